"""Where a key was written: YAML files read with line numbers."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from components.core.problems import Problem, RecipeError


@dataclass(frozen=True)
class Place:
    """A line of a file."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{display(self.file)}:{self.line}"


def display(path: Path) -> str:
    """A path as short as it can be: relative to the current directory where it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@dataclass(frozen=True)
class YamlFile:
    """One configuration file.

    Attributes:
        path: the file.
        keys: dotted key -> (value, place) of every leaf and section, ``defaults`` left out.
        defaults: entries of the ``defaults:`` list with their places, or None without a list.
        package_global: whether the file starts with ``# @package _global_``.
    """

    path: Path
    keys: dict[str, tuple[Any, Place]]
    defaults: list[tuple[Any, Place]] | None
    package_global: bool


@cache
def read(path: Path) -> YamlFile:
    """Parse a configuration file.

    Raises:
        RecipeError: unreadable, not YAML, not a mapping, or a key given twice; with file and line.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([Problem("", f"cannot read {display(path)}: {error}")]) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError([_syntax_problem(path, error)]) from error
    if root is None:
        return YamlFile(path, {}, None, False)
    if not isinstance(root, yaml.MappingNode):
        message = "a recipe is a mapping of keys to values; this file holds something else"
        raise RecipeError([Problem("", message, where=str(Place(path, 1)))])
    keys: dict[str, tuple[Any, Place]] = {}
    problems: list[Problem] = []
    _collect(root, "", path, keys, problems)
    if problems:
        raise RecipeError(problems)
    defaults = _defaults(root, path)
    return YamlFile(path, keys, defaults, "@package _global_" in text.split("\n", 1)[0])


def _syntax_problem(path: Path, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"{display(path)}:{mark.line + 1}:{mark.column + 1}" if mark else display(path)
    reason = getattr(error, "problem", None) or str(error)
    hint = "use spaces, not tabs" if "'\\t'" in reason else "look at the indentation and colons"
    return Problem("", f"this is not YAML: {reason}", hint, where)


def _collect(
    node: yaml.MappingNode,
    prefix: str,
    path: Path,
    keys: dict[str, tuple[Any, Place]],
    problems: list[Problem],
) -> None:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        name = str(key_node.value)
        line = key_node.start_mark.line + 1
        dotted = f"{prefix}.{name}" if prefix else name
        if name in seen:
            where = f"{display(path)}:{line}"
            message = f"this key is given twice; it was first set in line {seen[name]}"
            problems.append(Problem(dotted, message, "keep one of them", where))
            continue
        seen[name] = line
        if dotted == "defaults":
            continue
        value = yaml.SafeLoader("").construct_object(value_node, deep=True)
        keys[dotted] = (value, Place(path, line))
        if isinstance(value_node, yaml.MappingNode):
            _collect(value_node, dotted, path, keys, problems)


def _defaults(root: yaml.MappingNode, path: Path) -> list[tuple[Any, Place]] | None:
    for key_node, value_node in root.value:
        if key_node.value != "defaults":
            continue
        if not isinstance(value_node, yaml.SequenceNode):
            place = Place(path, key_node.start_mark.line + 1)
            message = "must be a list of configuration files"
            raise RecipeError([Problem("defaults", message, where=str(place))])
        loader = yaml.SafeLoader("")
        return [
            (loader.construct_object(item, deep=True), Place(path, item.start_mark.line + 1))
            for item in value_node.value
        ]
    return None
