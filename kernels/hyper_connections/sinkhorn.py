"""Sinkhorn-Knopp: make the streams' mixing matrix (nearly) doubly stochastic."""

from typing import Any

import torch


def sinkhorn_reference(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """The iteration, as autograd would run it; see ``sinkhorn``."""
    matrix = logits.softmax(-1) + eps
    for turn in range(2 * iterations - 1):
        axis = -1 if turn % 2 else -2
        matrix = matrix / (matrix.sum(axis, keepdim=True) + eps)
    return matrix


def _iterate(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """The same with the tokens last, (n, n, T): sums over a leading axis run at full width."""
    matrix = logits.softmax(1) + eps
    for turn in range(2 * iterations - 1):
        matrix = matrix / (matrix.sum(turn % 2, keepdim=True) + eps)
    return matrix


class _Sinkhorn(torch.autograd.Function):
    """Keeps the logits and runs the iteration again in backward: 2 x iterations tensors less."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations, ctx.eps = iterations, eps
        n = logits.shape[-1]
        tokens_last = logits.reshape(-1, n, n).permute(1, 2, 0).contiguous()
        return _iterate(tokens_last, iterations, eps).permute(2, 0, 1).reshape(logits.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        n = logits.shape[-1]
        tokens_last = logits.detach().reshape(-1, n, n).permute(1, 2, 0).contiguous()
        tokens_last.requires_grad_()
        with torch.enable_grad():
            m = _iterate(tokens_last, ctx.iterations, ctx.eps)
        pull = grad.reshape(-1, n, n).permute(1, 2, 0)
        (back,) = torch.autograd.grad(m, tokens_last, pull)
        return back.permute(2, 0, 1).reshape(logits.shape), None, None


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Softmax over the last axis, then columns and rows normalised in turn, columns last.

    The idea is mHC's (arXiv 2512.24880, section 4.2); the start from a softmax, the eps and the
    order are those of transformers' ``glm5_next``.

    Args:
        logits: (..., n, n); axis -2 is the incoming stream, axis -1 the outgoing one.
        iterations: times the columns are normalised, >= 1.
        eps: added to every entry after the softmax, and to every sum.

    Returns:
        The same shape; columns (axis -2) add up to 1 within about eps.
    """
    return _Sinkhorn.apply(logits, iterations, eps)
