"""The binder's findings for people: where each was written, and what was probably meant."""

from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from components.core.problems import Problem, listing
from components.core.recipe import Recipe
from launch.config.binder import Refused, UnknownKey
from launch.config.groups import CONF, groups
from launch.config.origins import place_of
from launch.config.schema import walk
from launch.config.sources import COMMAND_LINE, read
from launch.config.targets import TARGET, locate

_MANY = 3
_START = "start the recipe with\n  defaults:\n    - /base\n    - _self_"


def explain(
    problems: list[Problem], data: dict[str, Any], origins: dict[str, str]
) -> list[Problem]:
    """Add places and hints.

    Args:
        problems: what the binder found.
        data: the composed recipe.
        origins: dotted key -> place.
    """
    known = _known_paths(data)
    explained = [
        replace(_with_hint(problem, known), where=_where(problem, origins))
        for problem in _merged(problems)
    ]
    started = [problem for problem in explained if problem.hint == _START]
    return [replace(p, hint="") if p in started[1:] else p for p in explained]


def _known_paths(data: dict[str, Any]) -> list[str]:
    """Every legal dotted key and section of this recipe."""
    leaves = [key.path for key in walk(Recipe, classes=chosen_classes(data))]
    parts = [path.split(".") for path in leaves]
    return list(
        dict.fromkeys(".".join(words[:end]) for words in parts for end in range(1, len(words) + 1))
    )


def chosen_classes(data: dict[str, Any], prefix: str = "") -> dict[str, type]:
    """Dotted path -> class of every section that names a legal ``_target_``."""
    found: dict[str, type] = {}
    for name, value in data.items():
        if not isinstance(value, dict):
            continue
        path = f"{prefix}.{name}" if prefix else str(name)
        cls = locate(value[TARGET], path) if TARGET in value else None
        if isinstance(cls, type):
            found[path] = cls
        found.update(chosen_classes(value, path))
    return found


def _where(problem: Problem, origins: dict[str, str]) -> str:
    if isinstance(problem, Refused):
        exact = [origins[path] for path in problem.about if path in origins]
        if exact:
            return COMMAND_LINE if COMMAND_LINE in exact else exact[0]
    return place_of(origins, problem.path)


def _merged(problems: list[Problem]) -> list[Problem]:
    """Many unknown keys of one section, as after a change of its class, are one problem."""
    unknown: dict[str, list[UnknownKey]] = {}
    for problem in problems:
        if isinstance(problem, UnknownKey):
            unknown.setdefault(problem.section, []).append(problem)
    result: list[Problem] = []
    for problem in problems:
        many = unknown[problem.section] if isinstance(problem, UnknownKey) else []
        if len(many) <= _MANY:
            result.append(problem)
        elif problem is many[0]:
            names = ", ".join(each.name for each in many)
            message = f"there are no such keys: {names}"
            result.append(replace(many[0], path=many[0].section, message=message, name=""))
    return result


def _with_hint(problem: Problem, known: list[str]) -> Problem:
    if isinstance(problem, UnknownKey):
        return replace(problem, hint=_unknown_key_hint(problem, known))
    section, _, name = problem.path.rpartition(".")
    if problem.path in groups():
        if problem.message.startswith("must be set"):
            return replace(problem, hint=_START)
        if problem.message.startswith("expected a section"):
            hint = f"to choose an option of conf/{problem.path}, put into the defaults list:\n"
            return replace(problem, hint=f"{hint}  - override /{problem.path}: NAME")
    if name == TARGET and section in groups():
        return replace(problem, hint=listing(f"conf/{section} has", _targets_of(section)))
    if name == TARGET:
        return replace(problem, hint=f"remove it; {section} needs no {TARGET}")
    return problem


def _targets_of(group: str) -> list[str]:
    files = [read(CONF / group / f"{option}.yaml").keys for option in groups()[group]]
    return sorted({str(keys[TARGET][0]) for keys in files if TARGET in keys})


def _unknown_key_hint(problem: UnknownKey, known: list[str]) -> str:
    if "." in problem.name:
        section, _, key = problem.name.rpartition(".")
        return f"in a file, sections are nested: write `{key}:` indented below `{section}:`"
    siblings = problem.siblings if problem.section else ("defaults", *problem.siblings)
    guesses = suggestions(problem.name, problem.section, siblings, known)
    if guesses:
        return f"did you mean {' or '.join(guesses)}?"
    return listing(f"{problem.section or 'a recipe'} takes", siblings)


def suggestions(name: str, section: str, siblings: tuple[str, ...], known: list[str]) -> list[str]:
    """Dotted keys that a mistyped or misplaced key may have meant, best first, three at most.

    Args:
        name: last part of the unknown key.
        section: dotted path it was written under.
        siblings: keys of that section.
        known: every legal dotted path.
    """
    if not name:
        return []
    prefix = f"{section}." if section else ""
    near = {prefix + sibling: likeness(name, sibling) for sibling in siblings}
    if max(near.values(), default=0) >= 0.8:
        return _best(near, 0.8)
    far = {path: likeness(name, path.rpartition(".")[2]) for path in known}
    return _best({path: s for path, s in far.items() if s >= 0.75} or near, 0.6)


def _best(scores: dict[str, float], least: float) -> list[str]:
    top = max(scores.values(), default=0)
    close = {path: score for path, score in scores.items() if score >= max(least, top - 0.1)}
    return sorted(close, key=lambda path: (-close[path], path.count(".")))[:3]


def likeness(written: str, legal: str) -> float:
    """How likely ``written`` was meant to be ``legal``, 0 to 1.

    Besides the letters in common: ``cp`` and ``lr`` are initials, ``batch_size`` and ``max_steps``
    share whole words with the legal name.
    """
    a, b = written.lower().replace("-", "_"), legal.lower()
    if a == b:
        return 1.0
    if len(a) > 1 and _initials(b).startswith(a) or len(b) > 1 and _initials(a) == b:
        return 0.9
    short, long = sorted((a.split("_"), b.split("_")), key=len)
    shared = 0.7 + 0.2 * len(short) / len(long) if set(short) < set(long) else 0.0
    return max(shared, SequenceMatcher(None, a, b).ratio())


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))
