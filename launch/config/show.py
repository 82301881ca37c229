"""`make show`: every key of a recipe, its value and who set it."""

import json
from typing import Any

from launch.config import freeze
from launch.config.binder import TARGET
from launch.config.compose import COMMAND_LINE
from launch.config.load import Loaded, chosen_classes
from launch.config.schema import walk
from components.core.recipe import Recipe


def show(loaded: Loaded, everything: bool = False) -> str:
    """The resolved recipe as YAML-like lines with the origin of each value at the right.

    Args:
        everything: also list keys that no file sets, with their defaults and documentation.
    """
    plain = freeze.to_plain(loaded.recipe)
    origins = loaded.composed.origins
    docs = {key.path: key for key in walk(Recipe, classes=chosen_classes(plain))}
    lines: list[tuple[str, str]] = []
    for path, value in _leaves(plain):
        if path.endswith(TARGET):
            continue
        origin = _origin(origins, path)
        if not origin and not everything:
            continue
        text = f"{path}: {_inline(value)}"
        doc = docs[path].doc if everything and path in docs else ""
        lines.append((text, origin or f"default. {doc}".strip()))
    width = min(max((len(text) for text, _ in lines), default=0), 64)
    return "\n".join(f"{text:<{width}}  # {origin}" for text, origin in lines)


def _leaves(data: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            found += _leaves(value, path)
        else:
            found.append((path, value))
    return found


def _origin(origins: dict[str, str], path: str) -> str:
    """Who set this key; "" for a default. A section given whole on the command line counts."""
    if path in origins:
        return origins[path]
    while path := path.rpartition(".")[0]:
        if origins.get(path) == COMMAND_LINE:
            return COMMAND_LINE
    return ""


def _inline(value: Any) -> str:
    return "null" if value is None else json.dumps(value)
