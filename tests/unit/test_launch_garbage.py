"""When the launcher and its ranks leave the garbage collector alone."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launch import garbage
from launch.config.groups import ROOT

LAST_WORDS = """
import atexit, gc, weakref
from launch import garbage

class Ring:
    def __init__(self): self.itself = self
    def __del__(self): print("ring")

ring, held = Ring(), Ring()
weakref.finalize(held, print, "finalize")
atexit.register(print, "atexit")
{last}
"""


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    """As in a new process: a training, which other tests run, switches the collector off."""
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


def test_no_garbage_is_looked_for_inside_but_it_is_afterwards() -> None:
    with garbage.none_while_importing():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failing_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), garbage.none_while_importing():
        import components.there_is_no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with garbage.none_while_importing():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("garbage.leave_to_the_system()", ["atexit", "finalize"]),
        # What it spares: without it the interpreter looks for cycles when it ends.
        ("", ["atexit", "finalize", "ring", "ring"]),
    ],
)
def test_exit_handlers_run_where_cycles_are_left_to_the_system(last: str, words: list[str]) -> None:
    program = LAST_WORDS.format(last=last)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == words
