"""Functions put in the place of others while a block runs, and parts of a config tree for good."""

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


def swap_parts(root: Any, target: type, swap: Callable[[Any], Any]) -> None:
    """Put ``swap(config)`` in the place of every ``target`` in a config tree."""
    for _, config, parent, attribute in list(root.traverse(target)):
        setattr(parent, attribute, swap(config))
