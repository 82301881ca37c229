"""From a composed mapping to a checked, typed recipe, with all problems in one report."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.problems import RecipeError
from components.core.recipe import Recipe
from launch.config.binder import BAD, Binder
from launch.config.explain import explain

if TYPE_CHECKING:
    from launch.config.compose import Composed


@dataclass(frozen=True)
class Loaded:
    """A typed recipe and where its values came from."""

    recipe: Recipe
    composed: "Composed"


def load_recipe(path: Path, overrides: list[str]) -> Loaded:
    """Compose and bind a recipe. Cross-checks are in ``launch.config.checks``.

    Raises:
        RecipeError: everything that is wrong, each with file and line where known.
    """
    # Imported here: ranks type a frozen recipe and have no use for Hydra.
    from launch.config.compose import compose

    composed = compose(path, overrides)
    return Loaded(bind_recipe(composed.data, composed.origins), composed)


def bind_recipe(data: dict[str, Any], origins: dict[str, str] | None = None) -> Recipe:
    """Type a plain mapping (a composed recipe, or the frozen file of a run).

    Raises:
        RecipeError: all problems found.
    """
    binder = Binder()
    recipe = binder.construct(Recipe, data)
    if recipe is BAD or binder.problems:
        raise RecipeError(explain(binder.problems, data, origins or {}))
    assert isinstance(recipe, Recipe)
    return recipe
