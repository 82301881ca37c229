"""How the component words what it refuses."""

from collections.abc import Callable, Iterator
from typing import Any

from components.core.problems import Problem, shown

PATH = "components.context_parallel"


def refused(check: Callable[[], object], hint: str) -> Iterator[Problem]:
    """The error of a check, which begins with the key at fault, as a problem."""
    try:
        check()
    except ValueError as error:
        key, _, message = str(error).partition(": ")
        yield Problem(key, message, hint)


def no_effect(settings: Any, name: str, stock: Any, because: str) -> Iterator[Problem]:
    """A problem if the component's setting ``name`` is not what it is by default."""
    value = getattr(settings, name)
    if value != stock:
        message = f"{shown(value)} has no effect: {because}"
        hint = f"use {PATH}.{name}={stock if stock is not None else 'null'}"
        yield Problem(f"{PATH}.{name}", message, hint)
