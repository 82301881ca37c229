"""Settings that are each fine and do not work together."""

from collections.abc import Iterator

from components.core.problems import Problem
from components.core.recipe import Recipe


def check_combinations(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    """Problems of pairs of settings, each with the way out."""
    yield from _seed_checkpoint(recipe, world_size)
    yield from _context_parallel(recipe)


def _seed_checkpoint(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    if recipe.checkpoint.create_seed_checkpoint and world_size != 1:
        message = f"true needs one process, so that nothing is sharded; this job has {world_size}"
        yield Problem("checkpoint.create_seed_checkpoint", message, "add NGPU=1")


def _context_parallel(recipe: Recipe) -> Iterator[Problem]:
    degree = recipe.parallelism.context_parallel_degree
    if degree > 1 and recipe.model.attention == "varlen":
        message = f"'varlen' cannot run with parallelism.context_parallel_degree {degree}"
        yield Problem("model.attention", message, "use 'auto', 'flex' or 'sdpa'")
