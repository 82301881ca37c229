"""Products of low-precision operands that are accumulated and returned in full precision."""

from typing import Any

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` values are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def mm_accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` for (m, k) and (k, n) of one dtype, returned in ``accumulation_dtype``.

    Equals the product of the upcast operands up to the order of summation, because products of two
    bfloat16 values are exact in float32; on CUDA no upcast copy is made. Not differentiable there.
    """
    wide = accumulation_dtype(a.dtype)
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


class _LinearAccumulate(torch.autograd.Function):
    """Saves the operands in their own dtype; the backward products are taken in full precision."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return mm_accumulate(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = (grad.t() @ x.to(grad.dtype)).to(weight.dtype)
        return grad_x, grad_w


def linear_accumulate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` returned unrounded, for logits that decide a selection.

    Args:
        x: (T, in), any float dtype.
        weight: (out, in), the same dtype.

    Returns:
        (T, out) in ``accumulation_dtype``.
    """
    return _LinearAccumulate.apply(x, weight)
