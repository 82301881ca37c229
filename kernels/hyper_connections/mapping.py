"""The logits of a hyper-connection: normalise all streams together, then project."""

from typing import Any

import torch

from kernels.precision import accumulation_dtype, mm_accumulate


def project_reference(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition: an RMS norm without weight, then a linear map, in full precision."""
    x = streams.to(accumulation_dtype(streams.dtype))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x @ fn.to(x.dtype).t()


class _Project(torch.autograd.Function):
    """The norm is one factor per row, so it can be applied after the product: no upcast copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
        wide = accumulation_dtype(x.dtype)
        mean_square = torch.linalg.vector_norm(x, dim=-1, dtype=wide).square() / x.shape[-1]
        scale = torch.rsqrt(mean_square + eps).unsqueeze(-1)
        z = mm_accumulate(x, fn.t()) * scale
        ctx.save_for_backward(x, fn, scale, z)
        return z

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, fn, scale, z = ctx.saved_tensors
        dx = dfn = None
        if ctx.needs_input_grad[0]:
            # d scale / d x = -scale^3 x / width, and z already holds one factor of scale.
            pull = (z * dz).sum(-1, keepdim=True) * scale.square() / x.shape[-1]
            dx = torch.addcmul((dz * scale) @ fn.to(dz.dtype), x, pull, value=-1).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dfn = ((dz * scale).t() @ x.to(dz.dtype)).to(fn.dtype)
        return dx, dfn, None


def project(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms(streams) @ fn.T``, unrounded. Source: mHC, arXiv 2512.24880, section 4.

    Args:
        streams: (T, n * D), all streams of a token side by side; any float dtype.
        fn: (n^2 + 2n, n * D), the same dtype.
        eps: added to the mean square.

    Returns:
        (T, n^2 + 2n) in float32 (float64 for float64).
    """
    return _Project.apply(streams, fn, eps)
