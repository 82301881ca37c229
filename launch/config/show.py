"""`make show`: every key of a recipe, its value and who set it."""

import json
from typing import Any

from components.core.recipe import Recipe
from launch.config import freeze
from launch.config.explain import chosen_classes
from launch.config.load import Loaded
from launch.config.schema import walk


def show(loaded: Loaded, everything: bool = False) -> str:
    """The resolved recipe, one ``key: value`` a line, with the origin of each value at the right.

    Args:
        everything: also list keys that no file sets, with their defaults and documentation.
    """
    plain = freeze.to_plain(loaded.recipe)
    origins = loaded.composed.origins
    docs = {key.path: key.doc for key in walk(Recipe, classes=chosen_classes(plain))}
    lines: list[tuple[str, str]] = []
    for path, value in leaves(plain):
        origin = _origin(origins, path)
        if origin or everything:
            text = f"{path}: {_inline(value)}"
            lines.append((text, origin or f"default. {docs.get(path, '')}".strip()))
    width = min(max((len(text) for text, _ in lines), default=0), 64)
    return "\n".join(f"{text:<{width}}  # {origin}" for text, origin in lines)


def leaves(data: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted key and value of everything that is no section with keys below it."""
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            found += leaves(value, path)
        else:
            found.append((path, value))
    return found


def _origin(origins: dict[str, str], path: str) -> str:
    """Who set this key; "" for a default. A section set by a reference counts for its keys."""
    if path in origins:
        return origins[path]
    section = path.rpartition(".")[0]
    if not section or any(key.startswith(f"{section}.") for key in origins):
        return ""
    return _origin(origins, section)


def _inline(value: Any) -> str:
    return "null" if value is None else json.dumps(value, ensure_ascii=False)
