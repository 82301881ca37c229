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

MOST_ELEMENTS = 2**31 - 1
"""Of the keys and values that torch's fused kernels take at once: they count in int32, and give nan
beyond it without a word."""


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
    again. Working memory: keys and values of all tokens and ``heads_together`` in q's dtype, in
    backward their gradients in float32, and ``chunk_bytes``. One wait for the device per call: the
    documents' starts come to the host.

    Args:
        chunk_bytes: for the queries that are computed together, in float32.

    Raises:
        ValueError: see ``too_long``.
    """
    arguments = q, latent, kv_b, pools, position, start
    return _Dense.apply(*arguments, size, scale, chunk_bytes)


def too_long(tokens: int, width: int) -> str | None:
    """Why one kernel cannot address the keys and values of a head, or None if it can.

    Args:
        tokens: that are attended to.
        width: elements of a token's key and value in one head.
    """
    if tokens * width <= MOST_ELEMENTS:
        return None
    return (
        f"dense attention over {tokens:,} tokens has {tokens * width:,} elements of keys and "
        f"values per head, and torch's kernels address up to {MOST_ELEMENTS:,}; legal: up to "
        f"{MOST_ELEMENTS // width:,} tokens, or another model.sparse_mla_kernel"
    )


def heads_together(tokens: int, heads: int, width: int) -> int:
    """Heads whose keys and values one kernel addresses, all of them if it can.

    Raises:
        ValueError: see ``too_long``.
    """
    reason = too_long(tokens, width)
    if reason is not None:
        raise ValueError(f"model.sparse_mla_kernel: {reason}")
    most = max(1, MOST_ELEMENTS // max(1, tokens * width))
    return -(-heads // -(-heads // most))


def _head_groups(latent: torch.Tensor, kv_b: torch.Tensor, heads: int) -> list[slice]:
    each = heads_together(len(latent), heads, len(kv_b) // heads)
    return [slice(h, min(h + each, heads)) for h in range(0, heads, each)]


def _expand(latent: torch.Tensor, kv_b: torch.Tensor, q: torch.Tensor, some: slice) -> torch.Tensor:
    """Keys and values of all tokens and some heads: (h, T, d_qk + d_v) in the dtype of q."""
    maps = kv_b.unflatten(0, (q.shape[1], -1))[some]
    expanded = latent.to(q.dtype) @ maps.flatten(0, 1).to(q.dtype).t()
    return expanded.unflatten(1, maps.shape[:2]).transpose(0, 1)


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
        heads = q.shape[1]
        groups = _head_groups(latent, kv_b, heads)
        windows = list(_windows(position, start, groups[0].stop, chunk_bytes))
        out = q.new_empty(*q.shape[:2], len(kv_b) // heads - q.shape[2])
        for some in groups:
            expanded = _expand(latent, kv_b, q, some)
            for window in windows:
                mask = _mask(window, pools, position, start, size)
                part = q[window.rows, some]
                out[window.rows, some] = _attend(part, expanded[:, window.seen], mask, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, latent, kv_b, pools, position, start = ctx.saved_tensors
        size, scale, chunk_bytes = ctx.rest
        groups = _head_groups(latent, kv_b, q.shape[1])
        windows = list(_windows(position, start, groups[0].stop, chunk_bytes))
        grad_q, grad_kv_b = torch.empty_like(q), torch.zeros_like(kv_b)
        grad_latent = torch.zeros_like(latent, dtype=accumulation_dtype(latent.dtype))
        for some in groups:
            leaves = latent.detach().requires_grad_(), kv_b.detach().requires_grad_()
            with torch.enable_grad():
                expanded = _expand(*leaves, q, some)
            total = torch.zeros_like(expanded, dtype=accumulation_dtype(q.dtype))
            for window in windows:
                rows, seen = window
                mask = _mask(window, pools, position, start, size)
                part = q[rows, some].detach().requires_grad_()
                keys_values = expanded[:, seen].detach().requires_grad_()
                with torch.enable_grad():
                    out = _attend(part, keys_values, mask, scale)
                grad_q[rows, some], found = torch.autograd.grad(
                    out, (part, keys_values), grad_out[rows, some]
                )
                total[:, seen] += found
            of_latent, of_kv_b = torch.autograd.grad(expanded, leaves, total.to(q.dtype))
            grad_latent += of_latent
            grad_kv_b += of_kv_b  # zero outside of these heads
        return grad_q, grad_latent.to(latent.dtype), grad_kv_b, *(None,) * 6
