"""Bytes that recomputation keeps between forward and backward, on one rank."""

from typing import TYPE_CHECKING

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from components.models.glm_flash.indexer import Indexer

if TYPE_CHECKING:
    from components.core.recipe import Recipe

_EXPERT_ID = 8
_POOL = 4


def local_tokens(recipe: "Recipe") -> int:
    """Tokens of one forward pass on one rank."""
    parallel, training = recipe.parallelism, recipe.training
    split = parallel.context_parallel_degree * parallel.tensor_parallel_degree
    return training.local_batch_size * training.seq_len // split


def hidden_states(recipe: "Recipe", count: int) -> int:
    """``count`` hidden states as they pass between layers; 0 where their width is not known."""
    width = recipe.model.hidden_width or 0
    return count * width * local_tokens(recipe) * _element(recipe)


def sublayer_outputs(recipe: "Recipe", width: int) -> int:
    """The outputs of every layer's mixer and feed-forward part, ``width`` numbers a token each."""
    return 2 * recipe.model.n_layers * width * local_tokens(recipe) * _element(recipe)


def choices(recipe: "Recipe") -> int:
    """Expert ids of every router and pools of every indexer."""
    decoder = recipe.model.build_spec().model
    routers = decoder.traverse(TokenChoiceTopKRouter.Config)
    indexers = decoder.traverse(Indexer.Config)
    per_token = sum(_EXPERT_ID * router.top_k for _, router, *_ in routers)
    per_token += sum(_POOL * (indexer.topk // indexer.kpool) for _, indexer, *_ in indexers)
    return per_token * local_tokens(recipe)


def _element(recipe: "Recipe") -> int:
    return TORCH_DTYPE_MAP[recipe.training.mixed_precision_param].itemsize
