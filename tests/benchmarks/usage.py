"""Errors of the command line: one message, exit code 2, nearest legal value named."""

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """The command line asks for something that does not exist or cannot run here."""


def choose(value: str, legal: Iterable[str], what: str) -> str:
    """Return ``value`` if it is legal.

    Raises:
        UsageError: it is not; the message names ``what``, the nearest legal value and all of them.
    """
    names = list(legal)
    if value in names:
        return value
    near = get_close_matches(value, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"{what}: unknown value {value!r}{hint} (legal: {', '.join(names)})")
