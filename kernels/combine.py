"""Add up what a token's experts returned, weighted, in full precision and always in one order."""

from typing import Any

import torch

from kernels.expert_rows.op import sum_places
from kernels.precision import accumulation_dtype
from kernels.row_blocks import row_blocks


def weighted_sum_reference(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The definition; autograd keeps (T, K, D) in full precision. See ``weighted_sum``."""
    wide = accumulation_dtype(rows.dtype)
    picked = rows[place].to(wide) * weights.to(wide).unsqueeze(-1)
    return picked.sum(1).to(rows.dtype)


class _WeightedSum(torch.autograd.Function):
    """One pass over all rows on a GPU; elsewhere a block of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, place, weights)
        out = rows.new_empty(place.shape[0], rows.shape[1])
        sum_places(rows, place, weights, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gradients(grad, *ctx.saved_tensors)


class _RoundedSum(torch.autograd.Function):
    """One pass over all rows on a GPU; elsewhere a block of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, place, weights)
        out = rows.new_empty(place.shape[0], rows.shape[1])
        sum_places(rows, place, weights, out, rounded=True)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gradients(grad, *ctx.saved_tensors)


def _gradients(
    grad: torch.Tensor, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Of the rows and of the weights; rounding products has no gradient of its own."""
    wide = accumulation_dtype(rows.dtype)
    # Every row belongs to one pair of token and expert: plain assignment, no sum.
    grad_rows = torch.empty_like(rows)
    grad_weights = torch.empty_like(weights)
    for block in row_blocks(*grad.shape):
        pull = grad[block].to(wide)
        for k in range(place.shape[1]):
            at = place[block, k]
            grad_rows[at] = (pull * weights[block, k, None].to(wide)).to(rows.dtype)
            grad_weights[block, k] = (pull * rows[at].to(wide)).sum(1).to(weights.dtype)
    return grad_rows, None, grad_weights


def weighted_sum(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``out[t] = sum_k weights[t, k] * rows[place[t, k]]``, summed in full precision, then rounded.

    Equals the definition up to the order of summation; its gradients are equal to the bit but for
    that of ``weights``, whose sums over D may be taken in another order.

    Args:
        rows: (T * K, D), outputs of the experts, any order.
        place: int64 (T, K), a permutation of all rows.
        weights: (T, K).

    Returns:
        (T, D) in the dtype of ``rows``.
    """
    return _WeightedSum.apply(rows, place, weights)


def rounded_sum(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``weighted_sum`` of products that are rounded to the dtype of ``rows`` before they are added.

    They are added in the order of ``place``, in full precision, and the sum is rounded once. Takes,
    returns and keeps for backward what ``weighted_sum`` does.
    """
    return _RoundedSum.apply(rows, place, weights)
