"""Sizes of one layer's routed experts on one rank."""

from typing import TYPE_CHECKING

import torch
from torchtitan.models.common.moe import GroupedExperts

from components.core.sizes import local_tokens
from components.recompute.terms import kept_routed_outputs, output_bytes

if TYPE_CHECKING:
    from components.core.recipe import Recipe


def routed_tokens(recipe: "Recipe") -> int:
    """Tokens that the experts of one rank's layer are given at a time, before dispatch."""
    tokens, parallel, training = local_tokens(recipe), recipe.parallelism, recipe.training
    if parallel.expert_parallel_degree == 1:
        # Tensor-parallel ranks hold slices of all experts, and all tokens.
        tokens *= parallel.tensor_parallel_degree
    if parallel.pipeline_parallel_degree > 1:
        tokens = tokens * parallel.pipeline_parallel_microbatch_size // training.local_batch_size
    return tokens


def expert_parameters(recipe: "Recipe") -> int:
    """Parameters of one layer's routed experts, as gathered on one rank."""
    parallel = recipe.parallelism
    with torch.device("meta"):
        sizes = [
            sum(parameter.numel() for parameter in config.build().parameters())
            for _, config, *_ in recipe.model.build_spec().model.traverse(GroupedExperts.Config)
        ]
    shards = parallel.expert_parallel_degree
    return max(sizes) // (shards if shards > 1 else parallel.tensor_parallel_degree)


def kept_bytes(recipe: "Recipe") -> int:
    """Outputs of all layers' routed experts that recomputed layers take, instead of running the
    experts again."""
    output = output_bytes(recipe) * routed_tokens(recipe) // local_tokens(recipe)
    return output * sum(
        kept_routed_outputs(recipe, layer) for layer in range(recipe.model.n_layers)
    )
