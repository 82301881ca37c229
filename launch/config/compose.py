"""Compose a recipe with Hydra: files and overrides in, one plain mapping out."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.core.problems import Problem, RecipeError
from launch.config.groups import CONF, RECIPES
from launch.config.lint import check_recipe_file, parse_overrides
from launch.config.sources import Place, display, read

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Composed:
    """A recipe before it is typed.

    Attributes:
        path: the recipe file.
        overrides: as the user wrote them.
        data: nested plain values; every interpolation resolved.
        origins: dotted key -> "file:line" or "command line" for every key that something sets.
    """

    path: Path
    overrides: list[str]
    data: dict[str, Any]
    origins: dict[str, str]


def compose(recipe: Path, overrides: list[str]) -> Composed:
    """Compose one recipe.

    Args:
        recipe: the recipe file, anywhere on disk.
        overrides: ``key=value`` strings in Hydra's grammar.

    Raises:
        RecipeError: bad file, bad override, unknown option, unresolved interpolation or ``???``.
    """
    recipe = recipe.resolve()
    problems = check_recipe_file(recipe)
    if problems:
        raise RecipeError(problems)
    normalised = parse_overrides(overrides)
    config = _compose_with_hydra(recipe, normalised)
    choices = dict(config.hydra.runtime.choices)
    with_hydra = OmegaConf.to_container(config, resolve=False)
    assert isinstance(with_hydra, dict)
    with_hydra.pop("hydra")
    plain = OmegaConf.create(with_hydra)
    data = _resolve(plain)
    return Composed(recipe, overrides, data, _origins(recipe, choices, normalised))


def _compose_with_hydra(recipe: Path, overrides: list[str]) -> DictConfig:
    search = f"hydra.searchpath=[file://{RECIPES},file://{CONF}]"
    GlobalHydra.instance().clear()
    logging.getLogger("hydra").setLevel(logging.ERROR)
    try:
        with initialize_config_dir(config_dir=str(recipe.parent), version_base="1.3"):
            return hydra_compose(
                recipe.stem, overrides=[search, *overrides], return_hydra_config=True
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise RecipeError([_hydra_problem(error, recipe)]) from error
    finally:
        GlobalHydra.instance().clear()


def _hydra_problem(error: Exception, recipe: Path) -> Problem:
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = lines[0] if lines else type(cause).__name__
    if "No match in the defaults list" in str(error):
        hint = "a resolved recipe (of a run directory) has no groups left to choose from"
        return Problem("", text, hint, display(recipe))
    return Problem(getattr(cause, "full_key", "") or "", text, where=display(recipe))


def _resolve(config: DictConfig) -> dict[str, Any]:
    missing = OmegaConf.missing_keys(config)
    if missing:
        raise RecipeError(
            [Problem(key, "has no value yet (it is '???'); set it") for key in sorted(missing)]
        )
    try:
        data = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or ""
        reason = str(error).splitlines()[0]
        raise RecipeError([Problem(key, f"cannot be resolved: {reason}")]) from error
    assert isinstance(data, dict)
    return data


def _origins(recipe: Path, choices: dict[str, Any], overrides: list[str]) -> dict[str, str]:
    """Who set each key: later files win, the command line wins over all."""
    origins: dict[str, str] = {}
    for prefix, file in _files(recipe, choices):
        for key, (_, place) in read(file).keys.items():
            origins[f"{prefix}.{key}" if prefix else key] = str(place)
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        stale = [known for known in origins if known.startswith(f"{key}.")]
        for known in stale:
            del origins[known]
        origins[key] = COMMAND_LINE
    return origins


def _files(recipe: Path, choices: dict[str, Any]) -> list[tuple[str, Path]]:
    """Files in the order they apply, each with the dotted path its keys live under."""
    chain = _recipe_chain(recipe)
    chosen: list[tuple[str, Path]] = []
    if any(file == CONF / "base.yaml" for file in chain):
        for group, option in choices.items():
            if group.startswith("hydra/") or option is None:
                continue
            for file in _option_chain(CONF / group / f"{option}.yaml"):
                chosen.append((group, file))
    return chosen + [("", file) for file in chain]


def _recipe_chain(recipe: Path) -> list[Path]:
    """conf/base.yaml and the recipes a recipe extends, then the recipe itself."""
    chain: list[Path] = []
    for entry, _ in read(recipe).defaults or []:
        if not isinstance(entry, str) or entry == "_self_":
            continue
        name = entry.lstrip("/")
        for folder in (recipe.parent, RECIPES, CONF):
            parent = folder / f"{name}.yaml"
            if parent.is_file():
                chain += _recipe_chain(parent)
                break
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
    """Where a key, or the nearest section around it, was set; "" when nothing set it."""
    path = path.split("[")[0]
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return ""


__all__ = ["COMMAND_LINE", "Composed", "Place", "compose", "place_of"]
