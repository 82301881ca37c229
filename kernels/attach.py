"""Let a loss that is made in the middle of a model take part in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, loss: torch.Tensor, factor: float, seen: Callable | None
    ) -> torch.Tensor:
        ctx.seen, ctx.factor = seen, factor
        # Not through save_for_backward: a recomputed forward would save it a second time.
        ctx.loss = loss.detach()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.seen is not None:
            ctx.seen(ctx.loss)
        return grad, torch.full_like(ctx.loss, ctx.factor), None, None


def attach_loss(
    out: torch.Tensor,
    loss: torch.Tensor,
    factor: float = 1.0,
    seen: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """``out`` as it is; a backward pass through it also descends ``factor * loss``.

    The gradient of ``loss`` is ``factor``, whatever gradient arrives at ``out``.

    Args:
        out: any tensor that the training loss depends on.
        loss: a scalar.
        factor: of the loss in what is descended.
        seen: called with the detached loss in backward: once, however often forward is recomputed.
    """
    return _Attach.apply(out, loss, factor, seen)
