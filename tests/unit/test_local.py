"""How a local launch judges the end of its ranks."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.local import died_of_signal


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
