"""Add up what a token's experts returned, weighted, in full precision and always in one order."""

from typing import Any

import torch

from kernels.precision import accumulation_dtype


def weighted_sum_reference(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The definition, as autograd would run it; see ``weighted_sum``."""
    wide = accumulation_dtype(rows.dtype)
    picked = rows[place].to(wide) * weights.to(wide).unsqueeze(-1)
    return picked.sum(1).to(rows.dtype)


class _WeightedSum(torch.autograd.Function):
    """One pass per expert of a token, so that no (T, K, D) tensor in full precision exists."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, place, weights)
        total = rows.new_zeros(place.shape[0], rows.shape[1], dtype=accumulation_dtype(rows.dtype))
        for k in range(place.shape[1]):
            total.addcmul_(rows[place[:, k]].to(total.dtype), weights[:, k, None].to(total.dtype))
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, place, weights = ctx.saved_tensors
        wide = grad.to(accumulation_dtype(rows.dtype))
        # Every row belongs to one pair of token and expert: plain assignment, no sum.
        grad_rows = torch.empty_like(rows)
        grad_weights = torch.empty_like(weights)
        for k in range(place.shape[1]):
            at = place[:, k]
            grad_rows[at] = (wide * weights[:, k, None].to(wide.dtype)).to(rows.dtype)
            grad_weights[:, k] = (wide * rows[at].to(wide.dtype)).sum(1).to(weights.dtype)
        return grad_rows, None, grad_weights


def weighted_sum(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``out[t] = sum_k weights[t, k] * rows[place[t, k]]``, summed in full precision, then rounded.

    Args:
        rows: (T * K, D), outputs of the experts, any order.
        place: int64 (T, K), a permutation of all rows.
        weights: (T, K).

    Returns:
        (T, D) in the dtype of ``rows``.
    """
    return _WeightedSum.apply(rows, place, weights)
