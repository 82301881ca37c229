"""One matrix product per group of rows: torch's grouped kernel where it runs, a loop elsewhere.

The kernel reads where groups end from the device; groups without rows are allowed. It is not asked
where there is no row at all: strides of a transposed operand without rows do not tell its layout.
"""

import torch
import torch.nn.functional as F


def grouped_mm_loop(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The definition, one product per group; waits for the device to learn the group sizes."""
    if not len(x):
        return x @ weight[0].t()  # with a graph: parameters still get their gradient, zeros
    bounds = [0, *ends.tolist()]
    parts = [
        x[begin:end] @ weight[group].t()
        for group, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
    ]
    return torch.cat(parts)


def has_kernel(x: torch.Tensor) -> bool:
    """Whether torch's grouped kernel takes these rows; on CUDA they must be bfloat16."""
    if not len(x):
        return False
    if x.is_cuda:
        return x.dtype == torch.bfloat16
    return x.dtype in (torch.float32, torch.bfloat16)


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``out[i] = x[i] @ weight[g].T`` for the rows i of each group g.

    Args:
        x: (R, in), rows sorted by group; ``in`` and ``out`` multiples of 8.
        weight: (groups, out, in), the dtype of ``x``.
        ends: int32 (groups,), row after each group's last; the last is R.

    Returns:
        (R, out).
    """
    if has_kernel(x):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    return grouped_mm_loop(x, weight, ends)


def grouped_mm_by_columns(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """``out[i] = x[i] @ weight[g]``: the gradient of ``grouped_mm``'s rows.

    Args:
        x: (R, out), rows sorted by group.
        weight: (groups, out, in), the dtype of ``x``.
        ends: as for ``grouped_mm``.

    Returns:
        (R, in).
    """
    if has_kernel(x):
        return F.grouped_mm(x, weight, offs=ends)
    return grouped_mm_loop(x, weight.transpose(-2, -1), ends)


def grouped_outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``out[g] = a[g's rows].T @ b[g's rows]``: the gradient of ``grouped_mm``'s weights.

    Args:
        a: (R, out), rows sorted by group.
        b: (R, in), the same dtype.
        ends: as for ``grouped_mm``.

    Returns:
        (groups, out, in); zeros for a group without rows.
    """
    if has_kernel(a):
        return F.grouped_mm(a.t(), b, offs=ends)
    if not len(a):
        return a.new_zeros(len(ends), a.shape[1], b.shape[1])
    out = a.new_empty(len(ends), a.shape[1], b.shape[1])
    begin = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(a[begin:end].t(), b[begin:end], out=out[group])
        begin = end
    return out
