"""How many sequences one optimizer step reads."""

from typing import TYPE_CHECKING

from torchtitan.distributed import ParallelDims

if TYPE_CHECKING:
    from components.core.recipe import Recipe


def sequences_per_pass(recipe: "Recipe", ranks: int) -> int:
    """Sequences of one accumulation pass, over all ranks that read data of their own.

    The parallel degrees multiply to ``ranks``: the recipe has passed its checks.
    """
    dims = ParallelDims.from_config(recipe.parallelism, ranks)
    return recipe.training.local_batch_size * dims.dp_replicate * dims.dp_shard


def sequences_per_step(recipe: "Recipe", ranks: int) -> int:
    """``training.global_batch_size``, or one accumulation pass where it is left to the ranks."""
    wanted = recipe.training.global_batch_size
    return wanted if wanted > 0 else sequences_per_pass(recipe, ranks)
