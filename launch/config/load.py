"""From a composed mapping to a checked, typed recipe, with all problems in one report."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.core.problems import Problem, RecipeError, nearest
from components.core.recipe import Recipe
from launch.config.binder import BAD, TARGET, Binder, UnknownKey
from launch.config.compose import Composed, compose, place_of
from launch.config.schema import walk


@dataclass(frozen=True)
class Loaded:
    """A typed recipe and where its values came from."""

    recipe: Recipe
    composed: Composed


def load_recipe(path: Path, overrides: list[str]) -> Loaded:
    """Compose and bind a recipe. Cross-checks are in ``launch.config.checks``.

    Raises:
        RecipeError: everything that is wrong, each with file and line where known.
    """
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
        raise RecipeError(_explain(binder.problems, data, origins or {}))
    assert isinstance(recipe, Recipe)
    return recipe


def _explain(problems: list[Problem], data: dict, origins: dict[str, str]) -> list[Problem]:
    known = [key.path for key in walk(Recipe, classes=chosen_classes(data))]
    return [
        replace(
            _suggest(problem, known) if isinstance(problem, UnknownKey) else problem,
            where=place_of(origins, problem.path),
        )
        for problem in problems
    ]


def chosen_classes(data: dict[str, Any], prefix: str = "") -> dict[str, type]:
    """Dotted path -> class of every section that names a legal ``_target_``."""
    found: dict[str, type] = {}
    for name, value in data.items():
        if not isinstance(value, dict):
            continue
        path = f"{prefix}.{name}" if prefix else str(name)
        if TARGET in value:
            cls = Binder().locate(value[TARGET], path)
            if isinstance(cls, type):
                found[path] = cls
        found.update(chosen_classes(value, path))
    return found


def _suggest(problem: UnknownKey, known: list[str]) -> Problem:
    """Nearest legal names: siblings first, then the same word anywhere in the schema."""
    section = problem.path.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    found = [prefix + name for name in nearest(problem.name, problem.siblings, limit=2)]
    by_leaf: dict[str, list[str]] = {}
    for path in known:
        by_leaf.setdefault(path.rpartition(".")[2], []).append(path)
    for leaf in nearest(problem.name, by_leaf, limit=2, cutoff=0.8):
        found += by_leaf[leaf]
    found = [path for path in dict.fromkeys(found) if path != problem.path][:4]
    if not found:
        return problem
    return replace(problem, hint=f"did you mean {' or '.join(found)}?\n{problem.hint}")
