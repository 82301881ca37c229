"""``key=value`` words of the command line: what is wrong with them, and what Hydra is given.

Hydra's grammar reads the values (lists, mappings, quotes, numbers). Its answers to a mistake speak
of tokens; each rule here replaces one of them with a sentence.
"""

import re
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from components.core.problems import Problem
from launch.config.groups import groups
from launch.config.lint import option_problems
from launch.config.sources import COMMAND_LINE

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*", re.ASCII)
_EXAMPLE = "write key=value, such as training.steps=20 or 'data.paths=[a.txt, b.txt]'"


@dataclass(frozen=True)
class Assignment:
    """One override.

    Attributes:
        key: dotted key, or the name of a group whose option is chosen.
        value: plain value as Hydra's grammar reads it.
        is_choice: whether it chooses a group's option.
        text: the override in the form Hydra is given.
    """

    key: str
    value: Any
    is_choice: bool
    text: str


def parse_overrides(overrides: list[str]) -> tuple[list[Assignment], list[Problem]]:
    """Read the overrides of a command line.

    A plain key reaches Hydra as ``++key=value``: whether it exists is judged by the typed schema
    afterwards, which knows every key, rather than by what some file happens to mention.

    Returns:
        The overrides that can be read, and what is wrong with the others.
    """
    parsed = [_parse(text) for text in overrides]
    problems = [problem for found in parsed if isinstance(found, list) for problem in found]
    return [found for found in parsed if isinstance(found, Assignment)], problems


def _parse(text: str) -> Assignment | list[Problem]:
    key, equals, value = text.partition("=")
    key = key.lstrip("+")
    problem = _key_problem(text, key, equals)
    if problem is not None:
        return [problem]
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException:
        if key in groups():
            return option_problems(key, value, COMMAND_LINE)
        if _looks_structured(value):
            return [_unreadable(key, value)]
        # A word outside the grammar (~/x, a=b, größe) is text; the schema judges it like any other.
        quoted = QuotedString(value, Quote.single).with_quotes()
        return Assignment(key, value, False, f"++{key}={quoted}")
    if parsed.is_sweep_override():
        hint = "start one run for each"
        if key not in groups():
            hint += f"; for a list write '{key}=[...]', for text '{key}=\"...\"'"
        return [Problem(key, f"{value!r} is several values; a run takes one", hint, COMMAND_LINE)]
    plain = parsed.value()
    if key not in groups() or isinstance(plain, dict):
        return Assignment(key, plain, False, f"++{key}={value}")
    problems = option_problems(key, plain, COMMAND_LINE)
    return problems or Assignment(key, plain, True, f"{key}={value}")


def _key_problem(text: str, key: str, equals: str) -> Problem | None:
    """What is wrong with the part before the equals sign, if anything."""
    if text.startswith("~"):
        hint = "leave it out of the recipe, or set it to null where that is legal"
        return Problem(key.lstrip("~"), "an override cannot delete a key", hint, COMMAND_LINE)
    if not equals:
        what = "is a flag, not an override" if text.startswith("-") else "has no '='"
        hint = f"did you mean {text.replace(':', '=', 1)}?" if ":" in text else _EXAMPLE
        return Problem("", f"{text!r} {what}", hint, COMMAND_LINE)
    if not key.strip():
        return Problem("", f"{text!r} has no key before the '='", _EXAMPLE, COMMAND_LINE)
    if key.split(".")[0].split("/")[0] == "hydra":
        return Problem(key, "Hydra's own settings are fixed by this project", where=COMMAND_LINE)
    if "@" in key:
        hint = f"choose a group's option with {key.split('@')[0] or 'model'}=NAME"
        return Problem(key, "an '@' has no meaning in a key", hint, COMMAND_LINE)
    if _KEY.fullmatch(key):
        return None
    better = re.sub(r"\s*[./:]+\s*", ".", key).strip(" .")
    hint = f"did you mean {better}?" if _KEY.fullmatch(better) else _EXAMPLE
    message = f"{key!r} is not a key; keys are words joined by single dots"
    return Problem("", message, hint, COMMAND_LINE)


def _looks_structured(value: str) -> bool:
    return value.strip()[:1] in ("[", "{", "'", '"') or "${" in value or "\n" in value


def _unreadable(key: str, value: str) -> Problem:
    first = value.strip()[:1]
    if "\n" in value:
        message, hint = "the value holds a line break", "write it in the recipe file instead"
    elif first in ("[", "{"):
        message = f"the {'list' if first == '[' else 'mapping'} {value!r} cannot be read"
        hint = "brackets must close; quote items with special characters: ['a b', 'c,d'], {k: 'v'}"
    elif first in ("'", '"'):
        message, hint = f"the quoted text {value!r} does not end with its quote", ""
    else:
        message, hint = f"the reference in {value!r} is not complete", "write ${section.key}"
    return Problem(key, message, hint, COMMAND_LINE)
