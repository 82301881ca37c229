"""Bytes that recomputation keeps between forward and backward, on one rank."""

from typing import TYPE_CHECKING, cast

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from components.core.sizes import compute_itemsize, local_tokens, mixed_tokens
from components.expert_dispatch.cut import cut_of
from components.models.glm_flash.indexer import Indexer
from components.models.glm_flash.settings import GlmFlashModel

if TYPE_CHECKING:
    from components.core.recipe import Recipe

_EXPERT_ID = 8
_POOL = 4


def kept_sublayers(recipe: "Recipe", layer: int) -> int:
    """How many of a layer's two sub-layer outputs ``layer_recompute.keep_sublayers`` keeps.

    None of a segment's last layer, which is never rebuilt.
    """
    recompute, last = recipe.components.layer_recompute, recipe.model.n_layers - 1
    rebuilt = layer != last and (layer + 1) % recompute.every != 0
    return 2 if recompute.keep_sublayers and rebuilt else 0


def kept_outputs(recipe: "Recipe", layer: int) -> tuple[int, ...]:
    """Bytes of each output of a layer's parts that is kept for its recomputation, by whichever
    component."""
    return (
        (output_bytes(recipe),) * kept_sublayers(recipe, layer)
        + (_mixed_output_bytes(recipe),) * _kept_chunked_outputs(recipe, layer)
        + (_routed_output_bytes(recipe),) * kept_routed_outputs(recipe, layer)
    )


def kept_chunked_bytes(recipe: "Recipe", layer: int) -> int:
    """Outputs of a layer's chunked parts that are kept for its recomputation and no sub-layer's."""
    return _kept_chunked_outputs(recipe, layer) * _mixed_output_bytes(recipe)


def _kept_chunked_outputs(recipe: "Recipe", layer: int) -> int:
    """A chunked part's kept output is the sub-layer's, except for the shared expert's and, where
    tensor ranks have yet to be summed, all."""
    model, chunking = recipe.model, recipe.components.sublayer_chunking
    if not isinstance(model, GlmFlashModel) or not chunking.enabled:
        return 0
    dense = layer < model.n_dense_layers
    shared = chunking.shared_expert and not dense and model.n_shared_experts > 0
    if kept_sublayers(recipe, layer) and recipe.parallelism.tensor_parallel_degree == 1:
        return int(shared)
    mixer = chunking.kda if model.layer_types[layer] == "kda" else chunking.dsa
    return mixer + (chunking.feed_forward and dense) + shared


def kept_routed_outputs(recipe: "Recipe", layer: int) -> int:
    """1 if experts that run again in backward keep an output that is no sub-layer's, else 0."""
    if cut_of(recipe) is None or not recipe.components.layer_recompute.enabled:
        return 0
    moe = cast(Decoder.Config, recipe.model.build_spec().model).layers[layer].moe
    if moe is None:
        return 0
    is_sublayer = moe.shared_experts is None and recipe.parallelism.tensor_parallel_degree == 1
    return 0 if is_sublayer and kept_sublayers(recipe, layer) else 1


def output_bytes(recipe: "Recipe") -> int:
    """Bytes of the output of one mixer or feed-forward part, for the tokens of one rank."""
    return _width(recipe) * local_tokens(recipe) * compute_itemsize(recipe)


def _mixed_output_bytes(recipe: "Recipe") -> int:
    """The same before it is summed over tensor ranks, for the tokens of all of them."""
    return _width(recipe) * mixed_tokens(recipe) * compute_itemsize(recipe)


def _routed_output_bytes(recipe: "Recipe") -> int:
    """Slices of experts make a share of all outputs, whole experts those of a rank's tokens."""
    sliced = recipe.parallelism.expert_parallel_degree == 1
    return _mixed_output_bytes(recipe) if sliced else output_bytes(recipe)


def _width(recipe: "Recipe") -> int:
    model = recipe.model
    return model.dim if isinstance(model, GlmFlashModel) else model.hidden_width


def choices(recipe: "Recipe") -> int:
    """Expert ids of every router and pools of every indexer."""
    decoder = recipe.model.build_spec().model
    routers = decoder.traverse(TokenChoiceTopKRouter.Config)
    indexers = decoder.traverse(Indexer.Config)
    experts = sum(_EXPERT_ID * router.top_k for _, router, *_ in routers)
    pools = sum(_POOL * (indexer.topk // indexer.kpool) for _, indexer, *_ in indexers)
    spread = recipe.parallelism.expert_parallel_degree > 1
    routed = local_tokens(recipe) if spread else mixed_tokens(recipe)
    return experts * routed + pools * mixed_tokens(recipe)
