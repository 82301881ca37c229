"""The logits of a hyper-connection: normalise all streams together, then project."""

from typing import Any

import torch

from kernels.hyper_connections.merge import MadeOf, by_token, rows_of
from kernels.precision import accumulation_dtype, mm_accumulate
from kernels.row_blocks import row_blocks


def project_reference(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition: an RMS norm without weight, then a linear map, in full precision.

    Autograd keeps the streams in float32 twice, before and after the norm.
    """
    x = streams.to(accumulation_dtype(streams.dtype))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x @ fn.to(x.dtype).t()


class _Project(torch.autograd.Function):
    """The norm is one factor per row, so it can be applied after the product: no upcast copy."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, fn: torch.Tensor, eps: float, *made_of: torch.Tensor
    ) -> torch.Tensor:
        wide = accumulation_dtype(x.dtype)
        mean_square = torch.linalg.vector_norm(x, dim=-1, dtype=wide).square() / x.shape[-1]
        scale = torch.rsqrt(mean_square + eps).unsqueeze(-1)
        z = mm_accumulate(x, fn.t()) * scale
        ctx.save_for_backward(fn, scale, z, *(made_of or (x,)))
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fn, scale, z, *kept = ctx.saved_tensors
        scaled, wide_fn = dz * scale, fn.to(dz.dtype)
        count, width = len(z), fn.shape[1]
        # d scale / d x = -scale^3 x / width, and z already holds one factor of scale.
        pull = (z * dz).sum(-1, keepdim=True) * scale.square() / width
        dx = kept[0].new_empty(count, width) if ctx.needs_input_grad[0] else None
        dfn = torch.zeros_like(wide_fn) if ctx.needs_input_grad[1] else None
        source = by_token(*kept) if len(kept) > 1 else kept
        for block in row_blocks(count, width):
            rows = rows_of(source, block).flatten(1)
            if dx is not None:
                dx[block] = torch.addcmul(scaled[block] @ wide_fn, rows, pull[block], value=-1)
            if dfn is not None:
                dfn += scaled[block].t() @ rows.to(dz.dtype)
        made_of = kept[1:] and kept
        return dx, None if dfn is None else dfn.to(fn.dtype), None, *(None for _ in made_of)


def project(
    streams: torch.Tensor, fn: torch.Tensor, eps: float, made_of: MadeOf = ()
) -> torch.Tensor:
    """``rms(streams) @ fn.T``, unrounded. Source: mHC, arXiv 2512.24880, section 4.

    Equals the definition up to the order of summation and the place of one factor per row; keeps
    ``streams`` itself, and runs backward a block of rows at a time.

    Args:
        streams: (T, n * D), all streams of a token side by side; any float dtype.
        fn: (n^2 + 2n, n * D), the same dtype.
        eps: added to the mean square.
        made_of: kept instead of ``streams``.

    Returns:
        (T, n^2 + 2n) in float32 (float64 for float64).
    """
    return _Project.apply(streams, fn, eps, *made_of)
