"""Compose a recipe with Hydra: files and overrides in, one plain mapping out."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from components.core.problems import Problem, RecipeError, shown
from launch.config.groups import CONF, RECIPES
from launch.config.lint import recipe_problems, starts_from_base
from launch.config.origins import files_of, origins_of, place_of
from launch.config.overrides import Assignment, parse_overrides
from launch.config.references import resolve
from launch.config.sources import COMMAND_LINE, display, read


class _ProjectFolders(SearchPathPlugin):
    """Where Hydra looks besides the recipe's own folder.

    conf/ comes first, so that no file that happens to lie beside a recipe replaces one of its.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("conf", f"file://{CONF}")
        search_path.append("recipes", f"file://{RECIPES}")


Plugins.instance().register(_ProjectFolders)


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
    assignments, unreadable = parse_overrides(overrides)
    problems = recipe_problems(recipe) + unreadable
    if problems:
        raise RecipeError(problems)
    _refuse_choices_without_groups(recipe, assignments)
    config = _compose_with_hydra(recipe, assignments)
    choices = dict(config.hydra.runtime.choices)
    with_hydra = OmegaConf.to_container(config, resolve=False)
    assert isinstance(with_hydra, dict)
    with_hydra.pop("hydra")
    origins, unset = origins_of(recipe, choices, assignments)
    data = resolve(OmegaConf.create(with_hydra), origins, unset)
    return Composed(recipe, overrides, data, origins)


def _refuse_choices_without_groups(recipe: Path, assignments: list[Assignment]) -> None:
    choices = [assignment for assignment in assignments if assignment.is_choice]
    if choices and not starts_from_base(recipe, recipe.parent):
        message = f"{display(recipe)} has every value written out and no option left to choose"
        raise RecipeError(
            [
                Problem(c.key, message, f"set single keys: {c.key}.NAME=VALUE", COMMAND_LINE)
                for c in choices
            ]
        )


def _compose_with_hydra(recipe: Path, assignments: list[Assignment]) -> DictConfig:
    GlobalHydra.instance().clear()
    logging.getLogger("hydra").setLevel(logging.ERROR)
    try:
        with initialize_config_dir(config_dir=str(recipe.parent), version_base="1.3"):
            words = [assignment.text for assignment in assignments]
            return hydra_compose(recipe.stem, overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise RecipeError([_hydra_problem(error, recipe, assignments)]) from error
    finally:
        GlobalHydra.instance().clear()


def _hydra_problem(error: Exception, recipe: Path, assignments: list[Assignment]) -> Problem:
    """What is left for Hydra to find: broken files in conf/ and values that cannot be merged."""
    for file in sorted(CONF.rglob("*.yaml")):
        read(file)
    mixed = _list_in_place_of_section(recipe, assignments)
    if mixed is not None:
        return mixed
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None) or ""
    if isinstance(cause, GrammarParseError):
        hint = "a reference is written ${section.key}; for the characters themselves write \\${"
        origins, _ = origins_of(recipe, {}, assignments)
        where = place_of(origins, key) or display(recipe)
        return Problem(key, "the reference in this value is not complete", hint, where)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return Problem(key, lines[0] if lines else type(cause).__name__, where=display(recipe))


def _list_in_place_of_section(recipe: Path, assignments: list[Assignment]) -> Problem | None:
    """OmegaConf merges no list into a section, and does not say which."""
    given = [
        (key, value, str(place))
        for _, file in files_of(recipe, {})
        for key, (value, place) in read(file).keys.items()
    ]
    given += [(each.key, each.value, COMMAND_LINE) for each in assignments]
    sections = {key for key, value, _ in given if isinstance(value, dict)}
    sections |= {folder.name for folder in CONF.iterdir()}
    for key, value, where in given:
        if key in sections and isinstance(value, list):
            return Problem(key, f"expected a section of keys, got {shown(value)}", where=where)
    return None
