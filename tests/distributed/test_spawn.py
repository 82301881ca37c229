"""Ranks of tests: none fails, ends early or hangs in silence, and each sees the test's settings."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.spawn import run_ranks

pytestmark = pytest.mark.distributed


def note_setting(out: str) -> None:
    rank = os.environ["RANK"]
    (Path(out) / rank).write_text(f"{os.environ['WORLD_SIZE']} {os.environ.get('SETTING')}")


def refuse_in_one_rank() -> None:
    """The other one would wait for ever."""
    if os.environ["RANK"] == "1":
        raise ValueError("not here")
    time.sleep(1000)


def end_one_rank(how: str) -> None:
    if os.environ["RANK"] == "1":
        {
            "exit": lambda: sys.exit(0),
            "at once": lambda: os._exit(0),
            "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        }[how]()


def test_ranks_see_the_settings_of_their_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(note_setting, 2, tmp_path / "errors", str(tmp_path))
    assert {(tmp_path / rank).read_text() for rank in "01"} == {"2 None"}
    monkeypatch.setenv("SETTING", "x")
    run_ranks(note_setting, 3, tmp_path / "errors", str(tmp_path))
    assert {(tmp_path / rank).read_text() for rank in "012"} == {"3 x"}


def test_a_failing_rank_fails_the_test_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1\n(.*\n)+ValueError: not here"):
        run_ranks(refuse_in_one_rank, 2, tmp_path)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "SystemExit: 0"),
        ("at once", "rank 1 ended before it returned with exit code 0"),
        ("killed", "rank 1 ended with exit code -9"),
    ],
)
def test_a_rank_that_ends_early_fails_the_test(how: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=words):
        run_ranks(end_one_rank, 2, tmp_path, how)
