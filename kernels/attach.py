"""Let a loss that is made in the middle of a model take part in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, loss: torch.Tensor, seen: Callable | None
    ) -> torch.Tensor:
        ctx.seen = seen
        ctx.loss = loss.detach()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.seen is not None:
            ctx.seen(ctx.loss)
        return grad, torch.ones_like(ctx.loss), None


def attach_loss(
    out: torch.Tensor, loss: torch.Tensor, seen: Callable[[torch.Tensor], None] | None = None
) -> torch.Tensor:
    """``out`` as it is; a backward pass through it also descends ``loss``.

    Args:
        out: any tensor that the training loss depends on.
        loss: a scalar.
        seen: called with the detached loss in backward: once, however often forward is recomputed.
    """
    return _Attach.apply(out, loss, seen)
