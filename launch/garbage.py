"""Spare Python's garbage collector the objects that imports make: they live as long as the process.

torch, torchtitan and what they import make a million objects. The collector looks through them
again and again while they are imported, and three times more when the interpreter ends.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def none_while_importing() -> Iterator[None]:
    """Look for no garbage inside; it is found later as ever."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def leave_to_the_system() -> None:
    """Call last: the memory of what is still there is given back with the process, at once.

    Objects in reference cycles are not finalised any more. What must be written or released has to
    be, by then; handlers of ``atexit`` and ``weakref.finalize`` run as ever.
    """
    gc.freeze()
