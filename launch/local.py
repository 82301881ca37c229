"""Start a run on this machine: one process per device, through torchrun's agent."""

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from components.core.problems import Problem, RecipeError
from components.core.recipe import Hardware
from launch.config.groups import ROOT
from launch.rundir import RunDir

SHUTDOWN_SECONDS = 30
"""Grace for the other ranks once one has failed; they wait for it in a collective, for nothing."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        code: exit status for the shell: 0, 1, or 128 + the signal that stopped it.
        message: the failing rank's error, or "".
    """

    code: int
    message: str = ""


def rank_count(hardware: Hardware, device: str, asked: int | None) -> int:
    """Ranks of a local run.

    Args:
        hardware: the recipe's section.
        device: "cpu" or "cuda".
        asked: the user's NGPU, if given.

    Raises:
        RecipeError: more ranks than CUDA devices, or a number below one.
    """
    visible = torch.cuda.device_count() if device == "cuda" else 0
    wanted = asked if asked is not None else hardware.ranks
    if wanted == "auto":
        return max(visible, 1)
    key = "NGPU" if asked is not None else "hardware.ranks"
    if wanted < 1:
        raise RecipeError([Problem(key, f"{wanted} ranks; it must be at least 1")])
    if device == "cuda" and wanted > visible:
        nodes = -(-wanted // hardware.ranks_per_node)
        message = f"{wanted} ranks, but this machine has {visible} CUDA devices"
        hint = (
            f"on a cluster: make launch ON=slurm NODES={nodes}; here: NGPU={visible} with degrees "
            "to match, or hardware.device=cpu"
        )
        raise RecipeError([Problem(key, message, hint)])
    return int(wanted)


def start(run: RunDir, ranks: int, device: str) -> Outcome:
    """Run all ranks to the end and report how it went. Blocks.

    SIGTERM and SIGINT reach the ranks, which agree on a step, save it and leave.
    """
    _share_cores(ranks, device)
    # The agent reports a failure in its own words as well; the rank's own error is enough.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        # Otherwise the machine's own name is looked up, which takes long where nobody knows it.
        local_addr="localhost",
        max_restarts=0,
        logs_specs=_logs(run.logs, ranks),
        shutdown_timeout=SHUTDOWN_SECONDS,
        # Stopping is between us and the ranks: the agent would kill them while they save.
        signals_to_handle="SIGQUIT",
    )
    run.forget_status()
    asked: list[int] = []
    try:
        with _stop_signals_to_ranks(asked):
            elastic_launch(config, sys.executable)("-u", "-m", "launch.worker", str(run.path))
    except ChildFailedError as error:
        if died_of_signal(error, asked):
            return Outcome(128 + asked[0], "stopped before the first step")
        return Outcome(1, _first_failure(error, run))
    status = run.read_status()
    if not status:
        return Outcome(1, f"the ranks ended without finishing the run; see {run.logs}")
    stopped_by = status["signal"]
    return Outcome(128 + stopped_by if stopped_by else 0)


def died_of_signal(error: ChildFailedError, asked: list[int]) -> bool:
    """Whether the rank that failed first ended by a signal that it was sent to stop.

    Ranks that are still starting have no handler yet and die of it. Later ones save and leave, so
    any other failure while stopping, a full disk for one, is a failure.
    """
    _, failure = error.get_first_failure()
    return -failure.exitcode in asked


def _acknowledge(name: str) -> None:
    """A step may take a minute. Not by print, which a signal may have interrupted."""
    with contextlib.suppress(OSError):
        text = f"\n{name}: stopping after this step; a second Ctrl-C stops at once, unsaved\n"
        os.write(sys.stderr.fileno(), text.encode())


@contextlib.contextmanager
def _stop_signals_to_ranks(asked: list[int]) -> Iterator[None]:
    """Hand SIGTERM, SIGINT and SIGHUP on to the ranks, which save and leave by themselves.

    Args:
        asked: receives every signal that came.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        # A lost terminal is a reason to save and stop, like SIGTERM.
        number = signal.SIGTERM if number == signal.SIGHUP else number
        asked.append(number)
        workers = psutil.Process().children()
        if not workers:
            raise KeyboardInterrupt
        if len(asked) == 1:
            _acknowledge(signal.Signals(number).name)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _logs(folder: Path, ranks: int) -> DefaultLogsSpecs:
    """The first rank writes to the terminal; what others print goes to files."""
    quiet = {rank: Std.ALL if rank else Std.NONE for rank in range(ranks)}
    return DefaultLogsSpecs(log_dir=str(folder), redirects=quiet)


def _share_cores(ranks: int, device: str) -> None:
    """Several CPU ranks with all cores each would fight; torchrun's own default is one thread."""
    if device == "cpu" and ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))


def _first_failure(error: ChildFailedError, run: RunDir) -> str:
    # Where one was killed, the others' errors are of missing it, whenever they were written down.
    killed = [f for f in error.failures.items() if f[1].exitcode == -signal.SIGKILL]
    rank, failure = killed[0] if killed else error.get_first_failure()
    log = run.logs / f"rank_{rank}.log"
    if failure.exitcode == -signal.SIGKILL:
        reason = (
            "killed with signal 9. When nobody sent it, the machine ran out of HOST memory: "
            "look at `dmesg | tail`; lower the batch, the ranks per machine or what is offloaded"
        )
    else:
        message = failure.message
        if isinstance(message, dict):
            message = message.get("message", str(message))
        lines = str(message).strip().splitlines()[:20]
        reason = "\n  ".join(lines) or f"exit code {failure.exitcode}"
    return f"rank {rank} failed: {reason}\n  full log: {log}"
