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


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``.

    Args:
        gate, up: (m, F), of one dtype.
        limit: above 0; infinite for none.

    Returns:
        (m, F).
    """
    out = torch.empty_like(gate)
    if len(gate):
        _kernels(gate).swiglu(gate, up, limit, out)
    return out


def swiglu_gradients_(
    gate: torch.Tensor, up: torch.Tensor, back: torch.Tensor, weights: torch.Tensor, limit: float
) -> torch.Tensor:
    """``swiglu`` once more in place of ``back``, its gradients in place of ``gate`` and ``up``.

    Args:
        gate, up: (m, F), of one dtype; overwritten with their gradients. 0 where beyond ``limit``.
        back: (m, F), of their dtype; ``weights[i] * back[i]`` is the gradient of row i of the
            result. Overwritten with the result.
        weights: (m,), any float dtype.
        limit: as for ``swiglu``.

    Returns:
        The scalar products of the result's rows with those of ``back``, which are the gradients of
        the weights: (m,) in ``accumulation_dtype``.
    """
    dots = gate.new_empty(len(gate), dtype=accumulation_dtype(gate.dtype))
    if len(gate):
        _kernels(gate).swiglu_gradients_(gate, up, back, weights, limit, dots)
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
        rounded: each product is, to the dtype of ``rows``; sums are always, once, at the end.
    """
    if len(place):
        _kernels(rows).sum_places(rows, place, weights, out, rounded=rounded)


def _kernels(rows: torch.Tensor) -> ModuleType:
    if rows.is_cuda and rows.dtype != torch.float64:
        from kernels.expert_rows import triton_

        return triton_
    return naive
