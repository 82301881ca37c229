"""How a local launch judges the end of its ranks."""

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.local import _first_failure, died_of_signal
from launch.rundir import RunDir


@pytest.mark.parametrize(
    ("exit_code", "asked", "stopped"),
    [
        (-signal.SIGTERM, [signal.SIGTERM], True),
        (-signal.SIGINT, [signal.SIGINT], True),
        # A rank that could not save while it was stopping has failed.
        (1, [signal.SIGTERM], False),
        (-signal.SIGKILL, [signal.SIGTERM], False),
        # Somebody else's signal.
        (-signal.SIGTERM, [], False),
    ],
)
def test_only_a_rank_that_died_of_the_request_counts_as_stopped(
    exit_code: int, asked: list[int], stopped: bool
) -> None:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file="none")
    assert died_of_signal(ChildFailedError("worker", {0: failure}), asked) is stopped


def test_a_killed_rank_is_the_failure_although_another_noticed_first(tmp_path: Path) -> None:
    codes = {0: 1, 1: -signal.SIGKILL}
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1 + rank, exitcode=code, error_file="none")
        for rank, code in codes.items()
    }
    failures[0].timestamp, failures[1].timestamp = 1, 2
    text = _first_failure(ChildFailedError("worker", failures), RunDir(tmp_path))
    assert text.startswith("rank 1 failed: killed with signal 9")
