"""What a token dispatcher does with experts' outputs once they are back where the tokens are."""

import torch
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)

from components.titan.moe import UnroundedDispatcher
from kernels.expert_rows.op import sum_places

_ROUNDED = (AllToAllTokenDispatcher.combine, LocalTokenDispatcher.combine)


def combine_at_home(
    dispatcher: LocalTokenDispatcher,
    rows: torch.Tensor,
    place: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Weigh and sum the outputs of every token's experts, as the dispatcher does once it has them.

    Outputs are weighed in float32, and rounded then or once summed; either way the gradients of an
    output, and of its weight, are their products with the gradient of the token. On a GPU in one
    pass: torchtitan's sum would sort an index of every number there.

    Args:
        rows: outputs of experts, (T k, D), any order.
        place: row of every route, int64 (T, k); a token's routes ascend by expert.
        weights: of every route, (T, k), in the order of ``place``.
        out: the tokens, (T, D).

    Raises:
        ValueError: the dispatcher combines in a way of its own.
    """
    once = isinstance(dispatcher, UnroundedDispatcher)
    if not once and type(dispatcher).combine not in _ROUNDED:
        raise ValueError(
            f"the token dispatcher is a {type(dispatcher).__name__}, which combines rows in a way "
            "of its own; legal: torchtitan's standard dispatcher, or UnroundedDispatcher"
        )
    if rows.is_cuda:
        sum_places(rows, place, weights, out, rounded=not once)
    elif isinstance(dispatcher, UnroundedDispatcher):
        out.copy_(dispatcher.kernel(rows, place, weights))
    else:
        token = torch.arange(len(place), device=place.device).repeat_interleave(place.shape[1])
        metadata = LocalDispatchMetadata(
            token_indices_experts_sorted_N=token, topk_scores_experts_sorted_N=weights.flatten()
        )
        picked = rows[place.flatten()]
        out.copy_(LocalTokenDispatcher.combine(dispatcher, picked, metadata, out))
