"""Sparse latent attention as masked dense attention: what there is without a sparse kernel.

A baseline to measure against. Every query is multiplied with every earlier token of its document
and the others are masked away, so time grows with the square of a document's length, as it does
where a sparse kernel is missing and a library falls back. Queries go a chunk at a time through
torch's ``scaled_dot_product_attention``, so memory does not grow that way.
"""

import bisect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernels.dsa.keys import selected_tokens
from kernels.precision import accumulation_dtype

CHUNK_BYTES = 2**30
"""Default memory of the queries that are computed together: their masks, and where torch has no
fused kernel for masked attention their logits."""


class _Window(NamedTuple):
    """Queries ``rows`` and the tokens that any of them may see."""

    rows: slice
    seen: slice


def sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    *,
    size: int,
    scale: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """See ``kernels.dsa.plain.sparse_mla``: the same function, in q's dtype.

    Queries are those of consecutive tokens. Keeps its inputs for backward and computes the rest
    again. Working memory: keys and values of all tokens and heads in q's dtype, in backward their
    gradients in float32, and ``chunk_bytes``. One wait for the device per call: the documents'
    starts come to the host.

    Args:
        chunk_bytes: for the queries that are computed together, in float32.
    """
    arguments = q, latent, kv_b, pools, position, start
    return _Dense.apply(*arguments, size, scale, chunk_bytes)


def _expand(latent: torch.Tensor, kv_b: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys and values of all tokens: (heads, T, d_qk + d_v) in the dtype of q."""
    expanded = latent.to(q.dtype) @ kv_b.to(q.dtype).t()
    return expanded.view(len(latent), q.shape[1], -1).transpose(0, 1)


def _windows(
    position: torch.Tensor, start: torch.Tensor, heads: int, chunk_bytes: int
) -> Iterator[_Window]:
    """Cut the queries so that queries x tokens x heads in float32 stay within ``chunk_bytes``."""
    # Starts ascend with the queries: a chunk sees from its first query's start to its last query.
    first, begins = start.tolist(), 0
    last = (start + position).tolist()
    while begins < len(first):
        low = first[begins]

        def too_much(stop: int, begin: int = begins, low: int = low) -> bool:
            return 4 * heads * (stop - begin) * (last[stop - 1] + 1 - low) > chunk_bytes

        stops = range(begins + 1, len(first) + 1)
        stop = stops[max(0, bisect.bisect_left(stops, True, key=too_much) - 1)]
        yield _Window(slice(begins, stop), slice(low, last[stop - 1] + 1))
        begins = stop


def _mask(
    window: _Window, pools: torch.Tensor, position: torch.Tensor, start: torch.Tensor, size: int
) -> torch.Tensor:
    """bool (Q, S): query of the window attends to token of the window."""
    rows, seen = window
    tokens, used = selected_tokens(pools[rows], position[rows], start[rows], size)
    width = seen.stop - seen.start
    mask = torch.zeros(len(tokens), width + 1, dtype=torch.bool, device=tokens.device)
    # Unused slots write to a column that is cut off.
    mask.scatter_(1, torch.where(used, tokens - seen.start, width), True)
    return mask[:, :width]


def _attend(
    q: torch.Tensor, keys_values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """(Q, heads, d_qk) over (heads, S, d_qk + d_v) -> (Q, heads, d_v)."""
    d_qk = q.shape[-1]
    k, v = keys_values[..., :d_qk], keys_values[..., d_qk:]
    queries, keys, values = (x.unsqueeze(0) for x in (q.transpose(0, 1), k, v))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return out.squeeze(0).transpose(0, 1)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        pools: torch.Tensor,
        position: torch.Tensor,
        start: torch.Tensor,
        size: int,
        scale: float,
        chunk_bytes: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, latent, kv_b, pools, position, start)
        ctx.rest = size, scale, chunk_bytes
        expanded = _expand(latent, kv_b, q)
        out = q.new_empty(*q.shape[:2], expanded.shape[2] - q.shape[2])
        for window in _windows(position, start, q.shape[1], chunk_bytes):
            mask = _mask(window, pools, position, start, size)
            out[window.rows] = _attend(q[window.rows], expanded[:, window.seen], mask, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, latent, kv_b, pools, position, start = ctx.saved_tensors
        size, scale, chunk_bytes = ctx.rest
        leaves = latent.detach().requires_grad_(), kv_b.detach().requires_grad_()
        with torch.enable_grad():
            expanded = _expand(*leaves, q)
        grad_q = torch.empty_like(q)
        total = torch.zeros_like(expanded, dtype=accumulation_dtype(q.dtype))
        for rows, seen in _windows(position, start, q.shape[1], chunk_bytes):
            mask = _mask(_Window(rows, seen), pools, position, start, size)
            some = q[rows].detach().requires_grad_()
            keys_values = expanded[:, seen].detach().requires_grad_()
            with torch.enable_grad():
                out = _attend(some, keys_values, mask, scale)
            grad_q[rows], found = torch.autograd.grad(out, (some, keys_values), grad_out[rows])
            total[:, seen] += found
        of_maps = torch.autograd.grad(expanded, leaves, total.to(q.dtype))
        return grad_q, *of_maps, *(None,) * 6
