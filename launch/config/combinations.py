"""Settings that are each fine and do not work together."""

from collections.abc import Iterator

from components.core.problems import Problem
from components.core.recipe import Recipe

# torch shards block masks over context ranks in whole blocks of this many tokens.
MASK_BLOCK = 128


def check_combinations(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    """Problems of pairs of settings, each with the way out."""
    yield from _seed_checkpoint(recipe, world_size)
    yield from _context_parallel(recipe)
    yield from _expert_exchange(recipe)
    yield from _expert_numbers(recipe)


def _seed_checkpoint(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    if recipe.checkpoint.create_seed_checkpoint and world_size != 1:
        message = f"true needs one process, so that nothing is sharded; this job has {world_size}"
        yield Problem("checkpoint.create_seed_checkpoint", message, "add NGPU=1")


def _context_parallel(recipe: Recipe) -> Iterator[Problem]:
    degree, seq_len = recipe.parallelism.context_parallel_degree, recipe.training.seq_len
    if degree <= 1:
        return
    if recipe.model.attention == "varlen":
        message = f"'varlen' cannot run with parallelism.context_parallel_degree {degree}"
        yield Problem("model.attention", message, "use 'auto', 'flex' or 'sdpa'")
    unit = degree * MASK_BLOCK
    if seq_len % unit:
        down, up = seq_len // unit * unit, -(-seq_len // unit) * unit
        yield Problem(
            "training.seq_len",
            f"{seq_len} is not a multiple of {unit} (context_parallel_degree {degree} x "
            f"{MASK_BLOCK} tokens of a mask block)",
            f"nearest legal: {f'{down} or ' if down else ''}{up}",
        )


def _expert_exchange(recipe: Recipe) -> Iterator[Problem]:
    backend = getattr(recipe.model, "comm_backend", "standard")
    if backend != "standard" and recipe.parallelism.expert_parallel_degree == 1:
        message = f"{backend!r} exchanges tokens between expert-parallel ranks; there is only one"
        hint = "use 'standard', or parallelism.expert_parallel_degree 2 or more"
        yield Problem("model.comm_backend", message, hint)


def _expert_numbers(recipe: Recipe) -> Iterator[Problem]:
    is_gpt_oss = getattr(recipe.model, "family", None) == "gpt_oss"
    if is_gpt_oss and recipe.training.mixed_precision_param == "float32":
        message = "'float32' fails in torchtitan's gpt-oss experts, which always return bfloat16"
        yield Problem("training.mixed_precision_param", message, "use bfloat16")
