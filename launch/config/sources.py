"""Where a key was written: YAML files read with line numbers."""

import re
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from components.core.problems import Problem, RecipeError, shown

COMMAND_LINE = "command line"
"""Stands in place of a file and line."""

_NULL, _INT, _FLOAT, _MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "int", "float", "merge")
)
# Hydra looks for it in all comment lines above the first key.
_PACKAGE = re.compile(r"(?:[ \t]*(?:#.*)?\n)*?[ \t]*#\s*@package\s+(\S+)")
# 010 is eight and 1:30 is ninety.
_SURPRISING = re.compile(r"[-+]?(0[0-9_]+$|[0-9_]+:)")

# What PyYAML says (a part of it), and the same for people.
_YAML_WORDS = (
    ("'\\t'", "a tab in the indentation; use spaces"),
    ("<block", "the indentation does not fit the lines above"),
    ("mapping values are not", "a colon too many, or a line that is indented too far"),
    ("find expected ':'", "a key needs a colon and a space behind it"),
    ("sequence entries are not", "no list item can stand here"),
    ("<stream end>", "a bracket is never closed"),
    ("end of stream", "a quote is never closed"),
    ("another document", "a second document begins here; a recipe is one"),
    ("recursive", "an alias inside what it stands for"),
)


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
        package: what a ``# @package`` line at the top names, unless it is the usual place.
    """

    path: Path
    keys: dict[str, tuple[Any, Place]]
    defaults: list[tuple[Any, Place]] | None
    package: str


@cache
def read(path: Path) -> YamlFile:
    """Parse a configuration file.

    Raises:
        RecipeError: unreadable, not YAML, not a mapping, or a key given twice; with file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError([Problem("", f"{display(path)} is not UTF-8 text")]) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecipeError([Problem("", f"cannot read {display(path)}: {reason}")]) from error
    try:
        return _parse(text, path)
    except yaml.YAMLError as error:
        raise RecipeError([_syntax_problem(path, error)]) from error


def _parse(text: str, path: Path) -> YamlFile:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    match = _PACKAGE.match(text)
    package = match[1] if match and match[1] != "_global_" else ""
    if root is None or root.tag == _NULL:
        return YamlFile(path, {}, None, package)
    if not isinstance(root, yaml.MappingNode):
        message = "a recipe holds `key: value` lines; this file holds something else"
        raise RecipeError([Problem("", message, where=str(Place(path, 1)))])
    collector = _Collector(path)
    collector.collect(root, "")
    if collector.problems:
        raise RecipeError(collector.problems)
    return YamlFile(path, collector.keys, _defaults(root, path), package)


def _syntax_problem(path: Path, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"{display(path)}:{mark.line + 1}" if mark else display(path)
    reason = getattr(error, "problem", None) or str(error)
    if "constructor for the tag" in reason:
        message = f"the tag {reason.split('tag ')[-1]} is not used here"
        return Problem("", message, "write the plain value", where)
    plain = next((words for part, words in _YAML_WORDS if part in reason), reason)
    # The place that YAML gives is where it noticed, which is often one line late.
    hint = "look at this line and the one above: indentation, brackets, colons, quotes"
    return Problem("", f"this is not YAML: {plain}", hint, where)


class _Collector:
    """Walks a YAML tree and records every key with its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, tuple[Any, Place]] = {}
        self.problems: list[Problem] = []

    def collect(self, node: yaml.MappingNode, prefix: str) -> None:
        """Record the keys below ``node``, whose own dotted key is ``prefix``."""
        seen: dict[str, int] = {}
        # Merged keys first: a key that stands in the section itself wins.
        for key_node, value_node in sorted(node.value, key=lambda pair: pair[0].tag != _MERGE):
            place = Place(self.path, key_node.start_mark.line + 1)
            if key_node.tag == _MERGE:
                self._merge(value_node, prefix)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(prefix, "a key must be one word", "", str(place)))
                continue
            key = yaml.SafeLoader("").construct_object(key_node)
            name = key if isinstance(key, str) else shown(key)
            dotted = f"{prefix}.{name}" if prefix else name
            if name in seen:
                message = f"this key is given twice; it was first set in line {seen[name]}"
                self.problems.append(Problem(dotted, message, "keep one of them", str(place)))
                continue
            seen[name] = place.line
            if dotted != "defaults":
                self._record(value_node, dotted, place)

    def _record(self, node: yaml.Node, dotted: str, place: Place) -> None:
        # A copy: constructing a mapping replaces its `<<` by the merged keys, in the tree itself.
        value = yaml.SafeLoader("").construct_object(deepcopy(node), deep=True)
        self.keys[dotted] = (value, place)
        if isinstance(node, yaml.MappingNode):
            self.collect(node, dotted)
            return
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if item.tag in (_INT, _FLOAT) and _SURPRISING.match(item.value):
                number = yaml.SafeLoader("").construct_object(item)
                message = f"YAML 1.1 reads {item.value} as the number {number}"
                hint = f'write "{item.value}" with its quotes for the text, or {number}'
                self.problems.append(Problem(dotted, message, hint, str(place)))

    def _merge(self, node: yaml.Node, prefix: str) -> None:
        """``<<: *anchor``: the keys of the anchor, at the anchor's place."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for each in nodes:
            if isinstance(each, yaml.MappingNode):
                self.collect(each, prefix)


def _defaults(root: yaml.MappingNode, path: Path) -> list[tuple[Any, Place]] | None:
    for key_node, value_node in root.value:
        if key_node.value != "defaults":
            continue
        if not isinstance(value_node, yaml.SequenceNode):
            place = Place(path, key_node.start_mark.line + 1)
            message = "must be a list, such as"
            hint = "defaults:\n  - /base\n  - override /model: NAME\n  - _self_"
            raise RecipeError([Problem("defaults", message, hint, str(place))])
        loader = yaml.SafeLoader("")
        return [
            (loader.construct_object(item, deep=True), Place(path, item.start_mark.line + 1))
            for item in value_node.value
        ]
    return None
