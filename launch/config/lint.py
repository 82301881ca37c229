"""What is wrong with a recipe's name and its ``defaults`` list before Hydra looks at them.

Hydra 1.3 answers several of these mistakes with a traceback, a silent change of meaning or an
endless recursion; each rule here replaces one of them with a sentence.
"""

from pathlib import Path
from typing import Any

from components.core.problems import Problem, did_you_mean, listing, shown
from launch.config.groups import groups, recipe_file, recipe_names, reserved_names
from launch.config.sources import YamlFile, display, read

SELF = "_self_"
BASE = "base"


def recipe_problems(path: Path) -> list[Problem]:
    """Problems of a recipe file's name and ``defaults`` list, and of the recipes it extends."""
    if path.suffix != ".yaml":
        return [Problem("", f"{display(path)}: a recipe file ends in .yaml", "rename it")]
    return _problems(path, path.parent, ())


def _problems(path: Path, folder: Path, below: tuple[Path, ...]) -> list[Problem]:
    """Problems of one recipe; ``folder`` holds the recipe that is run, ``below`` what led here."""
    if path.stem in reserved_names():
        message = f"{path.stem!r} is a reserved name (conf/ has a file or folder called that)"
        return [Problem("", message, "give the recipe another name", display(path))]
    file = read(path)
    problems = []
    if "hydra" in file.keys:
        message = "Hydra's own settings are fixed by this project"
        problems.append(Problem("hydra", message, where=str(file.keys["hydra"][1])))
    if file.package:
        message = f"`# @package {file.package}` would move every key of this recipe elsewhere"
        problems.append(Problem("", message, "remove the line", display(path)))
    if file.defaults is None:
        return problems
    return problems + _Defaults(file, folder, below).problems()


class _Defaults:
    """The ``defaults`` list of one recipe, judged from top to bottom."""

    def __init__(self, file: YamlFile, folder: Path, below: tuple[Path, ...]) -> None:
        self.path, self.folder, self.below = file.path, folder, (*below, file.path)
        self.entries = file.defaults or []
        self.starts_from_base = ""
        self.parent_is_wrong = False
        self.chosen: set[str] = set()

    def problems(self) -> list[Problem]:
        problems = self._self_problems()
        for entry, place in self.entries:
            problems += self._entry(entry, str(place))
        return problems

    def _self_problems(self) -> list[Problem]:
        entries = [entry for entry, _ in self.entries]
        if entries.count(SELF) > 1:
            place = self.entries[len(entries) - 1 - entries[::-1].index(SELF)][1]
            return [Problem("defaults", "`- _self_` is given twice", where=str(place))]
        if SELF not in entries:
            where = str(self.entries[-1][1]) if entries else display(self.path)
            message = "the list must end with `- _self_`, which stands for this file's own values"
            return [Problem("defaults", message, where=where)]
        if entries[-1] != SELF:
            place = self.entries[entries.index(SELF)][1]
            message = "`- _self_` must come last, or the entries after it undo this recipe's values"
            return [Problem("defaults", message, where=str(place))]
        return []

    def _entry(self, entry: Any, where: str) -> list[Problem]:
        if entry == SELF:
            return []
        if isinstance(entry, str):
            problems = self._parent(entry, where)
            self.parent_is_wrong |= bool(problems)
            return problems
        if not isinstance(entry, dict) or len(entry) != 1:
            hint = "one of `- /base`, `- another_recipe`, `- override /model: NAME`, `- _self_`"
            message = f"{shown(entry)} is not an entry of this list"
            return [Problem("defaults", message, hint, where)]
        (key, option), *_ = entry.items()
        return self._choice(str(key), option, where)

    def _choice(self, key: str, option: Any, where: str) -> list[Problem]:
        words = key.split() or [""]
        group = words[-1].lstrip("/")
        if words != ["override", f"/{group}"] or "@" in group:
            group = group.split("@")[0]
            hint = did_you_mean(group, groups()) or listing("groups", groups())
            if group in groups():
                hint = f"write `- override /{group}: {option}`"
            message = f"{key!r} does not choose a group's option by its absolute name"
            return [Problem("defaults", message, hint, where)]
        if group in self.chosen:
            message = "this group's option is chosen twice in this list"
            return [Problem(group, message, "keep one of them", where)]
        self.chosen.add(group)
        problems = option_problems(group, option, where)
        if not problems and not self.starts_from_base and not self.parent_is_wrong:
            message = f"nothing before this line has an option of {group!r} to replace"
            problems = [Problem("defaults", message, "put `- /base` first", where)]
        return problems

    def _parent(self, entry: str, where: str) -> list[Problem]:
        """A plain entry names /base or another recipe."""
        name = entry.removeprefix("/")
        if name == BASE:
            if entry != "/base":
                return [Problem("defaults", "write `- /base`", where=where)]
            problems = self._second_start(entry, where)
            if not problems and self.entries[0][0] != entry:
                message = "`- /base` must come first, or it undoes what stands above it"
                problems = [Problem("defaults", message, where=where)]
            return problems
        parent = recipe_file(name, self.folder)
        if parent is None:
            return [self._no_parent(entry, name, where)]
        if parent.resolve() in [path.resolve() for path in self.below]:
            itself = len(self.below) == 1
            message = f"{entry!r} {'is this recipe itself' if itself else 'extends this one'}"
            return [Problem("defaults", message, where=where)]
        problems = _problems(parent, self.folder, self.below)
        if not problems and starts_from_base(parent, self.folder):
            problems = self._second_start(entry, where)
        return problems

    def _second_start(self, entry: str, where: str) -> list[Problem]:
        first, self.starts_from_base = self.starts_from_base, self.starts_from_base or entry
        if not first:
            return []
        message = f"{entry!r} starts from conf/base.yaml, and so does {first!r} above it"
        return [Problem("defaults", message, "keep one of them", where)]

    def _no_parent(self, entry: str, name: str, where: str) -> Problem:
        head, _, rest = entry.partition(":")
        if head.split()[:1] == ["override"] and rest:
            return Problem("defaults", f"{entry!r} lacks a space after its colon", where=where)
        group, _, option = name.rpartition("/")
        if option in groups().get(group, []):
            hint = f"write `- override /{group}: {option}`"
            return Problem("defaults", f"{entry!r} is a group's option, not a recipe", hint, where)
        message = f"{entry!r} is neither /base nor a recipe, beside this one or in recipes/"
        beside = [file.stem for file in self.folder.glob("*.yaml")]
        known = ["/base", SELF, *recipe_names(), *beside]
        return Problem("defaults", message, did_you_mean(name.split("/")[-1], known), where)


def starts_from_base(path: Path, folder: Path) -> bool:
    """Whether a lint-clean recipe, or one it extends, starts from conf/base.yaml."""
    for entry, _ in read(path).defaults or []:
        if entry == "/base":
            return True
        parent = recipe_file(entry.removeprefix("/"), folder) if isinstance(entry, str) else None
        if parent is not None and starts_from_base(parent, folder):
            return True
    return False


def option_problems(group: str, option: Any, where: str) -> list[Problem]:
    """Whether ``option`` is one of ``group``'s.

    Args:
        group: name of a folder in conf/, perhaps mistyped.
        option: name of a file in it, as YAML read it.
        where: place to report.
    """
    if group not in groups():
        hint = did_you_mean(group, groups()) or listing("groups", groups())
        return [Problem(group, f"there is no group {group!r}", hint, where)]
    options = groups()[group]
    if option in options:
        return []
    hint = listing("options", options)
    if isinstance(option, bool):
        hint = f"YAML reads on, off, yes and no as true and false\n{hint}"
    elif isinstance(option, str) and (guess := did_you_mean(option, options)):
        hint = f"{guess}\n{hint}"
    return [Problem(group, f"{shown(option)} is not an option of conf/{group}", hint, where)]
