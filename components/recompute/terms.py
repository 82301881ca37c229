"""Bytes that recomputation keeps between forward and backward, on one rank."""

from typing import TYPE_CHECKING

from torchtitan.models.common.moe import TokenChoiceTopKRouter

from components.core.sizes import compute_itemsize, local_tokens
from components.models.glm_flash.indexer import Indexer

if TYPE_CHECKING:
    from components.core.recipe import Recipe

_EXPERT_ID = 8
_POOL = 4


def sublayer_outputs(recipe: "Recipe", width: int) -> int:
    """The outputs of every layer's mixer and feed-forward part, ``width`` numbers a token each."""
    return 2 * recipe.model.n_layers * width * local_tokens(recipe) * compute_itemsize(recipe)


def choices(recipe: "Recipe") -> int:
    """Expert ids of every router and pools of every indexer."""
    decoder = recipe.model.build_spec().model
    routers = decoder.traverse(TokenChoiceTopKRouter.Config)
    indexers = decoder.traverse(Indexer.Config)
    per_token = sum(_EXPERT_ID * router.top_k for _, router, *_ in routers)
    per_token += sum(_POOL * (indexer.topk // indexer.kpool) for _, indexer, *_ in indexers)
    return per_token * local_tokens(recipe)
