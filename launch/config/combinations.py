"""Settings that are each fine and do not work together."""

from collections.abc import Iterator

from components.core.problems import Problem
from components.core.recipe import Recipe
from components.models.titan_attention import TitanAttentionSettings


def check_combinations(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    """Problems of pairs of settings, each with the way out."""
    yield from _seed_checkpoint(recipe, world_size)
    yield from _context_parallel(recipe)
    yield from _pipeline(recipe)
    yield from _checkpoints(recipe)


def _seed_checkpoint(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    if recipe.checkpoint.create_seed_checkpoint and world_size != 1:
        message = f"true needs one process, so that nothing is sharded; this job has {world_size}"
        yield Problem("checkpoint.create_seed_checkpoint", message, "add NGPU=1")


def _context_parallel(recipe: Recipe) -> Iterator[Problem]:
    degree, model = recipe.parallelism.context_parallel_degree, recipe.model
    varlen = isinstance(model, TitanAttentionSettings) and model.attention == "varlen"
    if degree > 1 and varlen:
        message = f"'varlen' cannot run with parallelism.context_parallel_degree {degree}"
        yield Problem("model.attention", message, "use 'auto', 'flex' or 'sdpa'")


def _pipeline(recipe: Recipe) -> Iterator[Problem]:
    """Training is right under torchtitan's pipelining; what the first rank reports is not."""
    degree = recipe.parallelism.pipeline_parallel_degree
    if degree > 1:
        yield Problem(
            "parallelism.pipeline_parallel_degree",
            f"{degree}: the loss is known to the last stage alone, and this project reports the "
            "first rank's",
            "use 1; shard with data_parallel_shard_degree, context_ or expert_parallel_degree",
        )


def _checkpoints(recipe: Recipe) -> Iterator[Problem]:
    settings = recipe.checkpoint
    if settings.resume is not None and (not settings.enable or settings.load_only):
        key = "enable" if not settings.enable else "load_only"
        value = "false" if not settings.enable else "true"
        message = f"{value} with checkpoint.resume: a continued run must load and save"
        yield Problem(f"checkpoint.{key}", message, "leave it out, or start a new run")
    if settings.resume is None and settings.load_step != -1:
        message = f"{settings.load_step} has no effect on a new run, which has nothing to load"
        yield Problem("checkpoint.load_step", message, "add checkpoint.resume, or leave it out")
