"""Matrix products that write where they are told, if asked in a wider dtype than they read."""

import torch

from kernels.precision import mm_accumulate
from kernels.row_blocks import row_blocks


def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out = a @ b`` for (m, k) and (k, n) of one dtype; k may be 0.

    ``out`` (m, n) is in their dtype, or in ``accumulation_dtype`` of it, and then unrounded.
    """
    if out.numel() == 0:
        return
    if a.shape[1] == 0:
        out.zero_()
    elif out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(mm_accumulate(a, b))


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b`` in place; dtypes as for ``multiply``.

    A total in the operands' own low precision is rounded once per call.
    """
    if total.numel() == 0 or a.shape[1] == 0:
        return
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        wide = b.to(total.dtype)
        for block in row_blocks(*a.shape):
            total[block].addmm_(a[block].to(total.dtype), wide)
