"""Recipes as files: find one, list them, copy one. YAML text alone: no torch, no Hydra."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.core.problems import Problem, RecipeError, did_you_mean
from launch.config.groups import CONF, RECIPES, ROOT, reserved_names

_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Entry:
    """A line of ``make recipes``.

    Attributes:
        name: what RECIPE= takes.
        description: the recipe's own ``description:``, or why it could not be read.
        hardware: devices it is written for, such as "8 x h200".
    """

    name: str
    description: str
    hardware: str


def find_recipe(asked: str, recipes_dir: Path = RECIPES) -> Path:
    """The file that RECIPE= means: a name in ``recipes_dir`` (``.yaml`` optional) or a path.

    Raises:
        RecipeError: no such file; nearest names are given.
    """
    named = recipes_dir / (asked if asked.endswith(".yaml") else f"{asked}.yaml")
    if "/" not in asked and named.is_file():
        return named
    path = Path(asked).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise RecipeError([_is_directory(asked, path, recipes_dir)])
    if "/" in asked:
        message, known = f"there is no file {asked!r}", _paths_in(path.parent)
    else:
        message, known = f"there is no recipe {asked!r}", _names_in(recipes_dir)
    guess = did_you_mean(asked, known)
    hint = f"{guess}\n" if guess else ""
    raise RecipeError([Problem("RECIPE", message, f"{hint}`make recipes` lists them")])


def _names_in(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _paths_in(folder: Path) -> list[str]:
    return sorted(str(file) for file in folder.glob("*.yaml"))


def _is_directory(asked: str, path: Path, recipes_dir: Path) -> Problem:
    inside = _paths_in(path)
    hint = (
        f"name a file in it: {' or '.join(inside[:3])}" if inside else "`make recipes` lists them"
    )
    guess = did_you_mean(asked, _names_in(recipes_dir))
    return Problem("RECIPE", f"{asked!r} is a folder", guess or hint)


def list_recipes(recipes_dir: Path) -> list[Entry]:
    """All recipes of a folder, by name, with ``quickstart`` first."""
    files = sorted(recipes_dir.glob("*.yaml"), key=lambda file: (file.stem != "quickstart", file))
    return [_entry(file, recipes_dir) for file in files]


def table(entries: list[Entry]) -> str:
    """The entries as aligned columns under a heading."""
    rows = [("RECIPE", "HARDWARE", "DESCRIPTION")]
    rows += [(entry.name, entry.hardware, entry.description) for entry in entries]
    name, hardware = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{a:<{name}}  {b:<{hardware}}  {c}".rstrip() for a, b, c in rows)


class _Unreadable(ValueError):
    """Why a file is no recipe, in a few words."""


def _entry(file: Path, recipes_dir: Path) -> Entry:
    try:
        facts = _facts(file, recipes_dir, ())
    except _Unreadable as error:
        return Entry(file.stem, f"cannot be read: {error}", "?")
    return Entry(file.stem, facts["description"], _hardware(facts["hardware"]))


def _facts(file: Path, recipes_dir: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """``description`` and the ``hardware`` keys, those of extended recipes included."""
    data = _load(file)
    hardware: dict[str, Any] = {}
    for entry in data.get("defaults") or []:
        if isinstance(entry, dict):
            hardware |= _hardware_option(entry)
            continue
        parent = recipes_dir / f"{str(entry).lstrip('/')}.yaml"
        if parent.is_file() and parent not in seen and parent != file:
            hardware |= _facts(parent, recipes_dir, (*seen, file))["hardware"]
    hardware |= data.get("hardware") or {}
    return {"description": " ".join(str(data.get("description", "")).split()), "hardware": hardware}


def _hardware_option(entry: dict[str, Any]) -> dict[str, Any]:
    for key, option in entry.items():
        file = CONF / "hardware" / f"{option}.yaml"
        if str(key).split()[-1].lstrip("/") == "hardware":
            return {"name": str(option)} | (_load(file) if file.is_file() else {})
    return {}


def _load(file: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise _Unreadable(f"not valid YAML{f' (line {mark.line + 1})' if mark else ''}") from error
    if not isinstance(data, dict):
        raise _Unreadable("not a mapping of settings")
    for key, kind, name in (("hardware", dict, "mapping"), ("defaults", list, "list")):
        if not isinstance(data.get(key) or kind(), kind):
            raise _Unreadable(f"{key} is not a {name}")
    return data


def _hardware(keys: dict[str, Any]) -> str:
    name, ranks = keys.get("name", "any"), keys.get("ranks", "auto")
    if keys.get("device") == "cpu":
        name = "cpu"
    elif name == "any":
        name = "cpu or gpu"
    return name if ranks == "auto" else f"{ranks} x {name}"


def new_recipe(name: str | None, source: str, recipes_dir: Path) -> str:
    """Copy the recipe ``source`` to ``recipes_dir/name.yaml``.

    Args:
        name: stem of the new file.
        source: what ``find_recipe`` takes.

    Returns:
        What was made and what to do with it, for the terminal.

    Raises:
        RecipeError: no such source, or a name that is missing, taken, reserved or no file stem.
    """
    problems = _problems_of_name(name, recipes_dir)
    if problems:
        raise RecipeError(problems)
    original = find_recipe(source, recipes_dir)
    target = recipes_dir / f"{name}.yaml"
    text = original.read_text(encoding="utf-8")
    # Commands quoted in the file's comments should start the copy.
    own_name = rf"\bRECIPE={re.escape(original.stem)}(?![\w./-])"
    with target.open("x", encoding="utf-8") as file:
        file.write(re.sub(own_name, f"RECIPE={name}", text))
    return (
        f"{_shown(target)} is a copy of {_shown(original)}. Next:\n"
        f"  edit  {_shown(target)}\n"
        f"  make show RECIPE={name}     its settings, and which file each comes from\n"
        f"  make check RECIPE={name}    every check, without training\n"
        f"  make train RECIPE={name}"
    )


def _problems_of_name(name: str | None, recipes_dir: Path) -> list[Problem]:
    if not name:
        return [Problem("RECIPE", "the new recipe needs a name", "make new RECIPE=mine FROM=other")]
    if name.endswith((".yaml", ".yml")):
        return [Problem("RECIPE", f"{name!r}: leave the suffix out", f"RECIPE={Path(name).stem}")]
    if not _STEM.fullmatch(name):
        message = f"{name!r} is no file name; use letters, digits, '_', '-' and '.'"
        return [Problem("RECIPE", message)]
    if name in reserved_names():
        message = f"{name!r} is a reserved name (conf/ has a file or folder called that)"
        return [Problem("RECIPE", message, "give the recipe another name")]
    target = recipes_dir / f"{name}.yaml"
    if target.exists():
        return [Problem("RECIPE", f"{_shown(target)} exists already", "choose another name")]
    return []


def _shown(path: Path) -> str:
    """Relative to the project's root where it lies inside."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
