"""Products of low-precision operands that are accumulated and returned in full precision."""

from typing import Any

import torch

from kernels.row_blocks import row_blocks


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` values are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def mm_accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` for (m, k) and (k, n) of one dtype, returned in ``accumulation_dtype``.

    Equals the product of the upcast operands up to the order of summation, because products of two
    bfloat16 values are exact in float32. No upcast copy of ``a`` is made: CUDA needs none, and
    elsewhere rows are upcast a block at a time. Not differentiable.
    """
    wide = accumulation_dtype(a.dtype)
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    out, wide_b = a.new_empty(a.shape[0], b.shape[1], dtype=wide), b.to(wide)
    for block in row_blocks(*a.shape):
        out[block] = a[block].to(wide) @ wide_b
    return out


def linear_accumulate_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The definition; autograd keeps the upcast copies. See ``linear_accumulate``."""
    wide = accumulation_dtype(x.dtype)
    return x.to(wide) @ weight.to(wide).t()


class _LinearAccumulate(torch.autograd.Function):
    """Saves the operands in their own dtype; the backward products are taken in full precision."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return mm_accumulate(x, weight.t())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide_weight = weight.to(grad.dtype)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_w = torch.zeros_like(wide_weight) if ctx.needs_input_grad[1] else None
        for block in row_blocks(*x.shape):
            if grad_x is not None:
                grad_x[block] = grad[block] @ wide_weight
            if grad_w is not None:
                grad_w += grad[block].t() @ x[block].to(grad.dtype)
        return grad_x, None if grad_w is None else grad_w.to(weight.dtype)


def linear_accumulate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` returned unrounded, for logits that decide a selection.

    Equals the definition up to the order of summation, gradients included.

    Args:
        x: (T, in), any float dtype.
        weight: (out, in), the same dtype.

    Returns:
        (T, out) in ``accumulation_dtype``.
    """
    return _LinearAccumulate.apply(x, weight)


def add_bmm_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b`` per batch, the products accumulated in ``total``'s precision.

    Args:
        total: (n, i, j) in ``accumulation_dtype``, changed in place.
        a: (n, i, k).
        b: (n, k, j), the same dtype.
    """
    if a.dtype == total.dtype:
        total.baddbmm_(a, b)
    elif a.is_cuda:
        total += torch.bmm(a, b, out_dtype=total.dtype)
    else:
        total.baddbmm_(a.to(total.dtype), b.to(total.dtype))
