"""Write a mixer's output back into the residual streams, and mix them."""

from typing import Any

import torch

from kernels.precision import accumulation_dtype
from kernels.row_blocks import row_blocks


def merge_reference(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """The definition; one small matrix product per token. See ``merge``."""
    post, mix = post.to(streams.dtype), mix.to(streams.dtype)
    return post.unsqueeze(-1) * out.unsqueeze(-2) + mix.transpose(-1, -2) @ streams


class _Merge(torch.autograd.Function):
    """One stream after the other, a block of tokens at a time."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        merged = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        (rows,), parts = _by_token(merged), _by_token(*inputs)
        for block in row_blocks(len(rows), rows.shape[1:].numel()):
            rows[block] = _merge_block(*(part[block] for part in parts))
        return merged

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]
        (rows,), parts, wholes = _by_token(grad), _by_token(*inputs), _by_token(*grads)
        for block in row_blocks(len(rows), rows.shape[1:].numel()):
            found = _merge_block_backward(rows[block], *(part[block] for part in parts))
            for whole, piece in zip(wholes, found, strict=True):
                whole[block] = piece
        return tuple(grads)


def _by_token(first: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Flat in the leading dimensions, all but two of the first tensor's."""
    last = first.dim() - 3
    return [t.flatten(0, last) for t in (first, *others)]


def _merge_block(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    # Rounded to the streams' dtype first, as the published model does.
    rounded = mix.to(streams.dtype)
    total = torch.zeros_like(streams, dtype=accumulation_dtype(streams.dtype))
    for i in range(streams.shape[-2]):
        total.addcmul_(rounded[..., i, :, None], streams[..., i, None, :])
    return (post.to(out.dtype).unsqueeze(-1) * out.unsqueeze(-2)).add_(total.to(out.dtype))


def _merge_block_backward(
    grad: torch.Tensor,
    streams: torch.Tensor,
    out: torch.Tensor,
    post: torch.Tensor,
    mix: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    wide = grad.to(accumulation_dtype(grad.dtype))
    post_w, mix_w = (t.to(streams.dtype).to(wide.dtype) for t in (post, mix))
    grad_streams, grad_mix = torch.empty_like(streams), torch.empty_like(mix)
    for i in range(streams.shape[-2]):
        grad_streams[..., i, :] = (mix_w[..., i, :, None] * wide).sum(-2)
        grad_mix[..., i, :] = (streams[..., i, None, :] * wide).sum(-1)
    grad_out = (post_w.unsqueeze(-1) * wide).sum(-2).to(out.dtype)
    return grad_streams, grad_out, (out.unsqueeze(-2) * wide).sum(-1).to(post.dtype), grad_mix


def merge(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """``new_j = post_j * out + sum_i mix_ij * streams_i``.

    Both weights are rounded to the streams' dtype first. Equals the definition up to the order of
    summation, gradients included; no copy of all streams in float32 exists.
    Source: mHC, arXiv 2512.24880, equation 3.

    Args:
        streams: (..., n, D) as they were read.
        out: (..., D), the mixer's output, the dtype of ``streams``.
        post: (..., n) float32.
        mix: (..., n incoming, n outgoing) float32.

    Returns:
        (..., n, D).
    """
    return _Merge.apply(streams, out, post, mix)
