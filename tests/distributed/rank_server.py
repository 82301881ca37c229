"""Processes that have imported torchtitan once, and fork a rank whenever one is wanted.

The imports of a training take eight seconds of a processor, more than most trainings here. A server
imports and runs nothing, so that a rank forked from it finds what a new process would find. There
are two, which ranks use in turn: strings hash differently in each, and a rank whose collectives
follow the order of a set will meet a neighbour of another order, as it does under torchrun.
"""

import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SERVERS = 2
FINISHED = 64
"""Exit code of a rank whose function has returned; one that leaves early has another."""


class Job(NamedTuple):
    """A function by name, with what torchrun tells a rank."""

    module: str
    function: str
    rank: int
    world_size: int
    port: int
    folder: Path
    environment: dict[str, str]
    args: tuple


class Server:
    """The tests' end: starts the process, which ends when this one does."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )

    def fork(self, job: Job) -> int:
        """Start a rank; its process id. Raises EOFError where the server is gone."""
        self.connection.send(pickle.dumps(job))
        return self.connection.recv()

    def exit_code(self, pid: int) -> int | None:
        """Of a rank; None while it runs, minus the signal's number if one ended it."""
        self.connection.send(pid)
        return self.connection.recv()


@cache
def server_of(rank: int) -> Server:
    """Started with the first rank that needs it, and kept for all tests of this process."""
    return Server() if rank < SERVERS else server_of(rank % SERVERS)


def serve(connection: Connection) -> None:
    """Fork and report until the tests' process is gone; ranks that it left behind end with it."""
    running: set[int] = set()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            break
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            running.discard(pid)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        pid = os.fork()
        if not pid:
            connection.close()
            run(pickle.loads(request))
            sys.exit(FINISHED)  # as every process ends: threads joined, exits called
        running.add(pid)
        connection.send(pid)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def run(job: Job) -> None:
    """Raises what the function raises, after writing it to the folder."""
    import torch

    from tests.training import set_rank

    torch.set_num_threads(1)
    # The tests' as it is now: the server's is of when the first rank was wanted.
    os.environ.clear()
    os.environ.update(job.environment, OMP_NUM_THREADS="1")
    set_rank(job.rank, job.world_size, job.port)
    try:
        getattr(importlib.import_module(job.module), job.function)(*job.args)
    except BaseException:
        report = f"rank {job.rank}\n{traceback.format_exc()}"
        (job.folder / f"rank_{job.rank}.error").write_text(report)
        raise


def main() -> None:
    from components.titan.device import use_cpu

    use_cpu()
    importlib.import_module("tests.training")
    from components.core.registry import component_types

    component_types()  # what a recipe names, with the models and kernels
    gc.freeze()  # a collection in a rank would copy the pages of all that was imported
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
