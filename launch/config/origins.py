"""Which file and line, or the command line, set each key of a composed recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.config.groups import CONF, recipe_file
from launch.config.sources import COMMAND_LINE, read

if TYPE_CHECKING:
    from launch.config.overrides import Assignment


def origins_of(
    recipe: Path, choices: dict[str, Any], assignments: "list[Assignment]"
) -> tuple[dict[str, str], list[str]]:
    """Dotted key -> "file:line" or "command line" of every key and section that something sets.

    Args:
        recipe: the recipe file.
        choices: group -> chosen option.
        assignments: overrides, in their order.

    Returns:
        The places, and the keys that were last set to ``???``.
    """
    origins: dict[str, str] = {}
    leaves: dict[str, Any] = {}

    def record(key: str, value: Any, place: str) -> None:
        # A value in place of a section, or the reverse, leaves nothing of what it replaces.
        if isinstance(value, dict):
            leaves.pop(key, None)
        else:
            leaves[key] = value
            for below in [known for known in origins if known.startswith(f"{key}.")]:
                del origins[below]
        for section in _sections_around(key):
            if section in leaves:
                del leaves[section]
                origins[section] = place
        origins[key] = place

    for prefix, file in files_of(recipe, choices):
        for key, (value, place) in read(file).keys.items():
            record(f"{prefix}.{key}" if prefix else key, value, str(place))
    for assignment in assignments:
        if not assignment.is_choice:
            for key, value in _flat(assignment.key, assignment.value):
                record(key, value, COMMAND_LINE)
    return origins, [key for key, value in leaves.items() if value == "???" and key in origins]


def _sections_around(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _flat(key: str, value: Any) -> list[tuple[str, Any]]:
    """A key and everything below it, outermost first."""
    below = value.items() if isinstance(value, dict) else ()
    return [(key, value), *(pair for k, v in below for pair in _flat(f"{key}.{k}", v))]


def files_of(recipe: Path, choices: dict[str, Any]) -> list[tuple[str, Path]]:
    """Files in the order they apply, each with the dotted path that its keys live under."""
    chain = _recipe_chain(recipe, recipe.parent)
    chosen: list[tuple[str, Path]] = []
    if any(file.parent == CONF for file in chain):
        for group, option in choices.items():
            if "/" not in group and option is not None:
                chosen += [(group, file) for file in _option_chain(CONF / group / f"{option}.yaml")]
    return chosen + [("", file) for file in chain]


def _recipe_chain(recipe: Path, folder: Path) -> list[Path]:
    """conf/base.yaml and the recipes a recipe extends, then the recipe itself."""
    chain: list[Path] = []
    for entry, _ in read(recipe).defaults or []:
        if entry == "/base":
            chain.append(CONF / "base.yaml")
        elif isinstance(entry, str):
            parent = recipe_file(entry.removeprefix("/"), folder)
            chain += _recipe_chain(parent, folder) if parent else []
    return [*chain, recipe]


def _option_chain(option: Path) -> list[Path]:
    """An option file after the options of the same group that it starts from."""
    if not option.is_file():
        return []
    chain: list[Path] = []
    for entry, _ in read(option).defaults or []:
        if isinstance(entry, str) and entry != "_self_":
            chain += _option_chain(option.parent / f"{entry}.yaml")
    return [*chain, option]


def place_of(origins: dict[str, str], path: str) -> str:
    """Where a key was set: itself, else something below it, else the section around it; or ""."""
    path = path.partition("[")[0]
    if path in origins:
        return origins[path]
    below = [place for key, place in origins.items() if key.startswith(f"{path}.")]
    if below:
        return below[-1]
    section = path.rpartition(".")[0]
    return place_of(origins, section) if section else ""
