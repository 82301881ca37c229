"""Sizes that memory arithmetic starts from, on one rank."""

from typing import TYPE_CHECKING

from torchtitan.config import TORCH_DTYPE_MAP

if TYPE_CHECKING:
    from components.core.recipe import Recipe

FLOAT32 = 4
"""Bytes of a number."""


def mean_tokens(recipe: "Recipe") -> int:
    """Tokens of one forward pass on one rank, on average."""
    return _tokens_of_tensor_ranks(recipe) // recipe.parallelism.tensor_parallel_degree


def mixed_tokens(recipe: "Recipe") -> int:
    """Tokens that a mixer of one rank is given in a forward pass: those of all tensor ranks; where
    the most are, if they differ."""
    context = recipe.components.context_parallel
    uneven = context.most_above_mean(recipe.model) if context.enabled else 0
    return _tokens_of_tensor_ranks(recipe) + uneven


def local_tokens(recipe: "Recipe") -> int:
    """Tokens of one forward pass on one rank; on the one with the most, where they differ."""
    return -(-mixed_tokens(recipe) // recipe.parallelism.tensor_parallel_degree)


def _tokens_of_tensor_ranks(recipe: "Recipe") -> int:
    training = recipe.training
    return (
        training.local_batch_size * training.seq_len // recipe.parallelism.context_parallel_degree
    )


def compute_itemsize(recipe: "Recipe") -> int:
    """Bytes of a number in the dtype that layers compute in."""
    return TORCH_DTYPE_MAP[recipe.training.mixed_precision_param].itemsize


def hidden_state(recipe: "Recipe") -> int:
    """Bytes that pass from one layer to the next."""
    return recipe.model.hidden_width * local_tokens(recipe) * compute_itemsize(recipe)


def logits(recipe: "Recipe") -> int:
    """Bytes of the logits that exist at one time: in the compute dtype, in float32, and their
    gradient in float32."""
    chunked = recipe.components.chunked_loss
    tokens = local_tokens(recipe) // (chunked.num_chunks if chunked.enabled else 1)
    return tokens * recipe.model.vocab_size * (compute_itemsize(recipe) + 2 * FLOAT32)
