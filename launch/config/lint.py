"""What is wrong with a recipe file or an override before Hydra looks at it.

Hydra 1.3 answers several of these with a traceback, a silent change of meaning or an endless
recursion; each rule here replaces one of them with a sentence.
"""

from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from components.core.problems import Problem, RecipeError, did_you_mean
from launch.config.groups import CONF, RECIPES, groups, recipe_names, reserved_names
from launch.config.sources import Place, YamlFile, display, read


def check_recipe_file(path: Path) -> list[Problem]:
    """Problems of a recipe file's name and ``defaults`` list, and of the recipes it extends."""
    if path.suffix != ".yaml":
        return [Problem("", f"{display(path)}: a recipe file ends in .yaml", "rename it")]
    if path.stem in reserved_names():
        message = f"{path.stem!r} is a reserved name (conf/ has a file or folder called that)"
        return [Problem("", message, "give the recipe another name", display(path))]
    file = read(path)
    if file.defaults is None:
        return []
    return _check_defaults(file, path)


def _check_defaults(file: YamlFile, path: Path) -> list[Problem]:
    problems: list[Problem] = []
    assert file.defaults is not None
    entries = [entry for entry, _ in file.defaults]
    if "_self_" not in entries:
        where = str(file.defaults[0][1]) if file.defaults else display(path)
        message = "the list must end with `- _self_`, which marks where this file's values apply"
        problems.append(Problem("defaults", message, where=where))
    elif entries[-1] != "_self_":
        place = file.defaults[entries.index("_self_")][1]
        message = "`- _self_` must come last, or the files after it undo this recipe's values"
        problems.append(Problem("defaults", message, where=str(place)))
    for entry, place in file.defaults:
        problems += _check_entry(entry, place, path)
    return problems


def _check_entry(entry: Any, place: Place, path: Path) -> list[Problem]:
    where = str(place)
    if entry == "_self_":
        return []
    if isinstance(entry, str):
        return _check_parent(entry, where, path)
    if not isinstance(entry, dict) or len(entry) != 1:
        message = f"{entry!r} is not an entry; write `- /base` or `- override /model: NAME`"
        return [Problem("defaults", message, where=where)]
    (key, option), *_ = entry.items()
    words = str(key).split()
    group = words[-1].lstrip("/")
    if words[0] != "override" or not words[-1].startswith("/"):
        hint = f"write `- override /{group}: {option}`"
        message = f"{key!r} must choose a group's option by its absolute name"
        return [Problem("defaults", message, hint, where)]
    return _check_option(group, option, where)


def _check_parent(entry: str, where: str, path: Path) -> list[Problem]:
    """A plain entry names conf/base or another recipe."""
    name = entry.lstrip("/")
    if (CONF / f"{name}.yaml").is_file():
        if entry.startswith("/"):
            return []
        return [Problem("defaults", f"write `- /{name}`", where=where)]
    for folder in (path.parent, RECIPES):
        parent = folder / f"{name}.yaml"
        if parent.is_file():
            if parent.resolve() == path.resolve():
                return [Problem("defaults", f"{name!r} is this recipe itself", where=where)]
            return check_recipe_file(parent)
    known = ["/base", *recipe_names()]
    message = f"{entry!r} is neither /base nor a recipe in {display(path.parent)} or recipes"
    return [Problem("defaults", message, did_you_mean(entry, known), where)]


def _check_option(group: str, option: Any, where: str) -> list[Problem]:
    if group not in groups():
        message = f"there is no group {group!r}; groups: {', '.join(groups())}"
        return [Problem(group, message, did_you_mean(group, groups()), where)]
    if isinstance(option, bool) or not isinstance(option, str):
        message = f"{option!r} is not the name of an option of {group!r}"
        hint = "YAML reads on, off, yes and no as true and false; quote the name"
        return [Problem(group, message, hint if isinstance(option, bool) else "", where)]
    options = groups()[group]
    if option in options:
        return []
    message = f"{option!r} is not one of: {', '.join(options)}"
    return [Problem(group, message, did_you_mean(option, options), where)]


def parse_overrides(overrides: list[str]) -> list[str]:
    """Check ``key=value`` overrides and put them in the form the composer needs.

    A plain key becomes ``++key=value``: whether it exists is judged by the typed schema afterwards,
    which knows every key, rather than by what some file happens to mention.

    Raises:
        RecipeError: all problems of all overrides.
    """
    problems: list[Problem] = []
    result: list[str] = []
    for text in overrides:
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException as error:
            reason = str(error).split("\n")[0]
            hint = "an override is key=value, e.g. training.steps=20 or data.paths=[a.txt,b.txt]"
            problems.append(Problem("", f"cannot read the override {text!r}: {reason}", hint))
            continue
        found = _check_override(parsed, text)
        problems += found
        if not found:
            result.append(_normalised(parsed, text))
    if problems:
        raise RecipeError(problems)
    return result


def _check_override(parsed: Override, text: str) -> list[Problem]:
    key = parsed.key_or_group
    if parsed.is_delete():
        hint = "leave the key out of your recipe, or set it to null where null is legal"
        return [Problem(key, "an override cannot delete a key", hint)]
    if key.split(".")[0].split("/")[0] == "hydra":
        return [Problem(key, "Hydra's own settings are fixed by this project", where=text)]
    if parsed.is_sweep_override():
        hint = f"to run several values, start one run each; for a list write {key}=[...]"
        return [Problem(key, f"{text!r} names several values; a run takes one", hint)]
    if key in groups() and not text.partition("=")[2].lstrip().startswith("{"):
        return _check_option(key, parsed.value(), "command line")
    return []


def _normalised(parsed: Override, text: str) -> str:
    if parsed.key_or_group in groups():
        return text.lstrip("+") if parsed.type is not OverrideType.CHANGE else text
    return "++" + text.lstrip("+")
