"""Which classes a recipe may name with ``_target_``, and finding them."""

import dataclasses
import importlib
import inspect
from typing import Any

from components.core.problems import Problem, did_you_mean, shown

TARGET = "_target_"
OUR_PACKAGES = ("components", "data", "kernels")
# Where torchtitan keeps the settings of what a recipe can train.
TITAN_PACKAGES = tuple(
    f"torchtitan.{name}" for name in ("components", "config", "distributed", "models")
)
PACKAGES = (*OUR_PACKAGES, *TITAN_PACKAGES)
# An image model, with a trainer of its own.
CLOSED = ("torchtitan.models.flux",)


def refuse_name(target: Any, path: str) -> Problem | None:
    """Judge the name of a class without importing anything.

    Args:
        target: what a recipe gives as the dotted name.
        path: dotted key that names it.
    """
    if isinstance(target, str) and _open(target):
        return None
    message = f"{shown(target)} may not be named here; it must be a settings class of "
    return Problem(path, message + ", ".join(PACKAGES))


def _open(name: str) -> bool:
    inside = any(_below(name, package) for package in PACKAGES)
    return inside and not any(_below(name, package) for package in CLOSED)


def _below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def locate(target: Any, path: str) -> type | Problem:
    """Import a settings class.

    Args:
        target: dotted name. Nothing outside ``PACKAGES`` is imported, and only dataclasses that
            are defined there are returned.
        path: dotted key that names it.

    Returns:
        The class, or what is wrong with the name.
    """
    problem = refuse_name(target, path)
    if problem is not None:
        return problem
    parts = target.split(".")
    found: Any = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], 1):
        owner = ".".join(parts[:depth])
        try:
            inside = _inside(found, owner, part)
        except ImportError as error:
            return Problem(path, f"{target!r} cannot be imported: {error}")
        if inside is None:
            public = [name for name in dir(found) if not name.startswith("_")]
            guess = did_you_mean(part, public)
            return Problem(path, f"{target!r}: {owner} has no {part!r}", guess)
        found = inside
    return _judge(found, target, path)


def _inside(owner: Any, owner_name: str, part: str) -> Any:
    """Attribute or submodule ``part``; None when there is none. ``ImportError`` if it is broken."""
    if hasattr(owner, part):
        return getattr(owner, part)
    if not inspect.ismodule(owner) or not part:
        return None
    name = f"{owner_name}.{part}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def _judge(found: Any, target: str, path: str) -> type | Problem:
    # An imported name such as torchtitan.components.loss.os would lead out of the packages again.
    home = getattr(found, "__module__", "")
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and _open(home)):
        return Problem(path, f"{target!r} is not a settings class")
    if inspect.isabstract(found):
        return Problem(path, f"{target!r} is the base of several classes; name one of them")
    return found
