"""Moving, weighing and summing experts' rows, on whatever device they are.

On a GPU in Triton, one pass over the rows each, but for float64; else in plain torch. Rows (n, D)
have their columns side by side in memory and may be further apart from each other. Nothing here is
differentiable, or waits for the device.
"""

from types import ModuleType

import torch

from kernels.expert_rows import naive
from kernels.precision import accumulation_dtype


def gather(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out[i] = rows[index[i]]``; returns ``out``.

    Args:
        rows: (n, D).
        index: int64 (m,), in [0, n).
        out: (m, D), the dtype of ``rows``.
    """
    if len(index):
        _kernels(rows).gather(rows, index, out)
    return out


def scatter(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """``out[index[i]] = rows[i]``.

    Args:
        rows: (m, D).
        index: int64 (m,), in [0, n), no number twice.
        out: (n, D), the dtype of ``rows``.
    """
    if len(index):
        _kernels(rows).scatter(rows, index, out)


def weigh_(rows: torch.Tensor, weights: torch.Tensor) -> None:
    """``rows[i] *= weights[i]`` in place, rounded once.

    Args:
        rows: (m, D).
        weights: (m,), any float dtype.
    """
    if len(rows):
        _kernels(rows).weigh_(rows, weights)


def dot_and_weigh_(
    other: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """The scalar products ``<other[i], rows[i]>``, in full precision; then ``weigh_``.

    Args:
        other, rows: (m, F), of one dtype.
        weights: (m,), any float dtype.

    Returns:
        (m,) in ``accumulation_dtype``.
    """
    dots = rows.new_empty(len(rows), dtype=accumulation_dtype(rows.dtype))
    if len(rows):
        _kernels(rows).dot_and_weigh_(other, rows, weights, dots)
    return dots


def sum_places(
    rows: torch.Tensor,
    place: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    *,
    rounded: bool = False,
) -> None:
    """``out[t] = sum_k weights[t, k] * rows[place[t, k]]``, in the order of k.

    Args:
        rows: (n, D).
        place: int64 (T, K), in [0, n).
        weights: (T, K), any float dtype; None: all 1.
        out: (T, D), the dtype of ``rows``.
        rounded: to the dtype of ``rows`` after each product and each sum; else once, at the end.
    """
    if len(place):
        _kernels(rows).sum_places(rows, place, weights, out, rounded=rounded)


def _kernels(rows: torch.Tensor) -> ModuleType:
    if rows.is_cuda and rows.dtype != torch.float64:
        from kernels.expert_rows import triton_

        return triton_
    return naive
