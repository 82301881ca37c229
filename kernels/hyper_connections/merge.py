"""Write a mixer's output back into the residual streams, and mix them.

Streams are the widest thing that a layer keeps, and those between its mixer and its feed-forward
part are merged of what it keeps anyway. Functions that read such streams can keep that instead
(``MadeOf``), and merge a block of tokens again when they need it: the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.precision import accumulation_dtype
from kernels.row_blocks import row_blocks

MadeOf = tuple[torch.Tensor, ...]
"""The arguments of the ``merge`` that made some streams, without a graph; empty: streams that are
kept themselves."""


def merge_reference(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """The definition; one small matrix product per token. See ``merge``."""
    post, mix = post.to(streams.dtype), mix.to(streams.dtype)
    return post.unsqueeze(-1) * out.unsqueeze(-2) + mix.transpose(-1, -2) @ streams


class _Merge(torch.autograd.Function):
    """One stream after the other, a block of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: torch.Tensor,
        out: torch.Tensor,
        post: torch.Tensor,
        mix: torch.Tensor,
        unread: bool,
        *made_of: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(out, post, mix, *(made_of or (streams,)))
        if unread:
            return streams.new_zeros(()).expand(streams.shape)
        merged = torch.empty_like(streams, memory_format=torch.contiguous_format)
        (rows,), parts = by_token(merged), by_token(streams, out, post, mix)
        for block in row_blocks(len(rows), rows.shape[1:].numel()):
            rows[block] = _merge_block(*(part[block] for part in parts))
        return merged

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out, post, mix, *kept = ctx.saved_tensors
        # What streams were merged of begins with streams of the same shape and dtype.
        inputs = kept[0], out, post, mix
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]
        (rows,), wholes = by_token(grad), by_token(*grads)
        (_, *parts), source = by_token(*inputs), by_token(*kept)
        for block in row_blocks(len(rows), rows.shape[1:].numel()):
            streams = rows_of(source, block)
            found = _merge_block_backward(rows[block], streams, *(part[block] for part in parts))
            for whole, piece in zip(wholes, found, strict=True):
                whole[block] = piece
        made_of = kept[1:] and kept
        return *grads, None, *(None for _ in made_of)


def rows_of(source: Sequence[torch.Tensor], block: slice) -> torch.Tensor:
    """Rows of some streams: (t, n, D).

    Args:
        source: the streams (T, n, D), or what they were merged of, ``by_token``.
    """
    parts = [tensor[block] for tensor in source]
    return parts[0] if len(parts) == 1 else _merge_block(*parts)


def by_token(first: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
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
    streams: torch.Tensor,
    out: torch.Tensor,
    post: torch.Tensor,
    mix: torch.Tensor,
    made_of: MadeOf = (),
    unread: bool = False,
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
        made_of: kept instead of ``streams``.
        unread: only the graph is wanted; returns zeros that take no memory.

    Returns:
        (..., n, D).
    """
    return _Merge.apply(streams, out, post, mix, unread, *made_of)
