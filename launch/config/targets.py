"""Which classes a recipe may name with ``_target_``, and finding them."""

import dataclasses
import importlib
import inspect
from typing import Any

from components.core.problems import Problem, did_you_mean, shown

TARGET = "_target_"
OUR_PACKAGES = ("components", "data", "kernels")
PACKAGES = (*OUR_PACKAGES, "torchtitan")


def locate(target: Any, path: str) -> type | Problem:
    """Import a settings class.

    Args:
        target: dotted name. Only our packages and torchtitan are looked into, and only their
            dataclasses are returned.
        path: dotted key that names it.

    Returns:
        The class, or what is wrong with the name.
    """
    parts = target.split(".") if isinstance(target, str) else []
    if not parts or parts[0] not in PACKAGES:
        message = f"{shown(target)} may not be named here; it must be a settings class of "
        return Problem(path, message + ", ".join(PACKAGES))
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
    # An imported name such as torchtitan.trainer.os would lead out of the packages again.
    ours = getattr(found, "__module__", "").partition(".")[0] in PACKAGES
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and ours):
        return Problem(path, f"{target!r} is not a settings class")
    if inspect.isabstract(found):
        return Problem(path, f"{target!r} is the base of several classes; name one of them")
    return found
