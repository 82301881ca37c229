"""Run a function on several gloo ranks, one process each.

A process trains once: torchtitan's typed meshes do not survive a second trainer on several ranks.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.rank_server import FINISHED, SERVERS, Job, server_of

LIMIT_SECONDS = 240


def run_ranks(function: Callable[..., None], world_size: int, folder: Path, *args: Any) -> None:
    """Call ``function(*args)`` in ``world_size`` processes and wait.

    Args:
        function: importable by name; reads its rank from the environment.
        folder: receives ``rank_<n>.error`` for a rank that failed.

    Raises:
        AssertionError: a rank failed, with its traceback, or ended before its function returned.
    """
    from tests.training import free_port

    folder.mkdir(parents=True, exist_ok=True)
    port, name = free_port(), (function.__module__, function.__name__)
    for rank in range(min(world_size, SERVERS)):
        server_of(rank)  # all of them import at the same time
    pids: dict[int, int] = {}
    try:
        for rank in range(world_size):
            job = Job(*name, rank, world_size, port, folder, dict(os.environ), args)
            pids[rank] = server_of(rank).fork(job)
        _wait(pids, function.__name__)
    except AssertionError as error:
        reports = [file.read_text() for file in sorted(folder.glob("rank_*.error"))]
        raise AssertionError("\n".join(reports) or str(error)) from error
    finally:
        # All of them first: a server that is gone ends the loop below.
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for rank, pid in pids.items():
            while server_of(rank).exit_code(pid) is None:
                time.sleep(0.01)


def _wait(pids: dict[int, int], name: str) -> None:
    """Until all ranks have ended well; drops those that have from ``pids``."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while pids:
        for rank in list(pids):
            code = server_of(rank).exit_code(pids[rank])
            if code is not None:
                del pids[rank]
            if code not in (None, FINISHED):
                early = " before it returned" if code == 0 else ""
                raise AssertionError(f"{name}: rank {rank} ended{early} with exit code {code}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{name} hung for {LIMIT_SECONDS} s")
        time.sleep(0.02)
