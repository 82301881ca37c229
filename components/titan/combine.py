"""What a token dispatcher does with experts' outputs once they are back where the tokens are."""

import torch
from torchtitan.config import derive
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from components.titan.moe import RoundedDispatcher, UnroundedDispatcher
from components.titan.parts import module_class
from kernels.expert_rows.op import sum_places

_STOCK = (AllToAllTokenDispatcher.combine, LocalTokenDispatcher.combine)


def keep_outputs(config: LocalTokenDispatcher.Config) -> RoundedDispatcher.Config:
    """The config of a dispatcher of torchtitan's, with sums that keep no float32 copy.

    Raises:
        ValueError: the dispatcher combines in a way of its own.
    """
    _refuse_other(module_class(config))
    return derive(config, RoundedDispatcher.Config)


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
    pass.

    Args:
        rows: outputs of experts, (T k, D), any order.
        place: row of every route, int64 (T, k); a token's routes ascend by expert.
        weights: of every route, (T, k), in the order of ``place``.
        out: the tokens, (T, D).

    Raises:
        ValueError: the dispatcher combines in a way of its own.
    """
    if not isinstance(dispatcher, UnroundedDispatcher):
        _refuse_other(type(dispatcher))
        sum_places(rows, place, weights, out, rounded=True)
    elif rows.is_cuda:
        sum_places(rows, place, weights, out)
    else:
        out.copy_(dispatcher.kernel(rows, place, weights))


def _refuse_other(dispatcher: type[LocalTokenDispatcher]) -> None:
    """Raises: ValueError, if it does not weigh and sum as torchtitan's standard one does."""
    if issubclass(dispatcher, RoundedDispatcher) or dispatcher.combine in _STOCK:
        return
    raise ValueError(
        f"the token dispatcher is a {dispatcher.__name__}, which combines rows in a way of its "
        "own; legal: torchtitan's standard dispatcher, or UnroundedDispatcher"
    )
