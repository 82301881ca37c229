"""Functions of a module or class put in the place of others while a block runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, function: Callable) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def kept(owner: Any, name: str, results: list[Any]) -> Iterator[None]:
    """Keeps what a function returns while it lasts."""
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        results.append(original(*args))
        return results[-1]

    with replaced(owner, name, call):
        yield


@contextmanager
def counted(owner: Any, name: str, calls: list[str]) -> Iterator[None]:
    """Writes down calls of a function while it lasts."""
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        calls.append(name)
        return original(*args)

    with replaced(owner, name, call):
        yield
