"""The configuration tree on disk: groups, their options, and recipes."""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
RECIPES = ROOT / "recipes"


@cache
def groups() -> dict[str, list[str]]:
    """Group name ("model") to the names of its options."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def recipe_names() -> list[str]:
    """Recipes that ship with the project, by name."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def recipe_file(name: str, folder: Path) -> Path | None:
    """The recipe that a ``defaults`` entry names, or None.

    Args:
        name: stem of the file, without folder.
        folder: where the recipe that is run lies; it comes before recipes/.
    """
    if not name or "/" in name:
        return None
    files = (folder / f"{name}.yaml", RECIPES / f"{name}.yaml")
    return next((file for file in files if file.is_file()), None)


def reserved_names() -> set[str]:
    """File stems a recipe must not have, because Hydra would take the file in conf/ instead."""
    return {file.stem for file in CONF.glob("*.yaml")} | set(groups()) | {"hydra"}
