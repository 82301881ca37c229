"""Sparse multi-head latent attention without positions: the slow, exact, memory-bounded twin.

The absorbed form: every head's key and value are linear maps of one latent row per token, so the
maps are applied to the query and to the output instead of to all tokens. Internally float32
(float64 for float64 inputs).
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.dsa.keys import selected_tokens
from kernels.precision import accumulation_dtype

_CHUNK_BYTES = 256 * 2**20


class _Chunk:
    """A few queries and what both passes need of them: keys, probabilities, absorbed queries."""

    def __init__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        w_key: torch.Tensor,
        tokens: torch.Tensor,
        used: torch.Tensor,
        scale: float,
    ) -> None:
        self.tokens = tokens
        self.q = q.to(latent.dtype)
        self.keys = latent[tokens]
        self.absorbed = torch.einsum("qhd,hdr->qhr", self.q, w_key)
        logits = torch.einsum("qhr,qkr->qhk", self.absorbed, self.keys) * scale
        self.probabilities = logits.masked_fill_(~used.unsqueeze(1), float("-inf")).softmax(-1)
        self.mixed = torch.einsum("qhk,qkr->qhr", self.probabilities, self.keys)


class _SparseMla(torch.autograd.Function):
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
    ) -> torch.Tensor:
        ctx.save_for_backward(q, latent, kv_b, pools, position, start)
        ctx.size, ctx.scale = size, scale
        w_key, w_value, wide = _split(kv_b, latent, q)
        out = q.new_empty(*q.shape[:2], w_value.shape[1])
        for rows, chunk in _chunks(q, wide, w_key, pools, position, start, size, scale):
            out[rows] = torch.einsum("qhr,hvr->qhv", chunk.mixed, w_value).to(out.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, latent, kv_b, pools, position, start = ctx.saved_tensors
        w_key, w_value, wide = _split(kv_b, latent, q)
        grad_q = torch.empty_like(q)
        grad_latent = torch.zeros_like(wide)
        grad_w_key, grad_w_value = torch.zeros_like(w_key), torch.zeros_like(w_value)
        for rows, c in _chunks(q, wide, w_key, pools, position, start, ctx.size, ctx.scale):
            grad = grad_out[rows].to(wide.dtype)
            grad_w_value += torch.einsum("qhv,qhr->hvr", grad, c.mixed)
            grad_mixed = torch.einsum("qhv,hvr->qhr", grad, w_value)
            grad_p = torch.einsum("qhr,qkr->qhk", grad_mixed, c.keys)
            inner = (grad_mixed * c.mixed).sum(-1, keepdim=True)
            grad_logits = c.probabilities * (grad_p - inner) * ctx.scale
            grad_absorbed = torch.einsum("qhk,qkr->qhr", grad_logits, c.keys)
            grad_q[rows] = torch.einsum("qhr,hdr->qhd", grad_absorbed, w_key).to(q.dtype)
            grad_w_key += torch.einsum("qhd,qhr->hdr", c.q, grad_absorbed)
            grad_keys = torch.einsum("qhk,qhr->qkr", c.probabilities, grad_mixed)
            grad_keys += torch.einsum("qhk,qhr->qkr", grad_logits, c.absorbed)
            grad_latent.index_add_(0, c.tokens.flatten(), grad_keys.flatten(0, 1))
        grad_kv_b = torch.cat([grad_w_key, grad_w_value], 1).flatten(0, 1).to(kv_b.dtype)
        return grad_q, grad_latent.to(latent.dtype), grad_kv_b, *(None,) * 5


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
) -> torch.Tensor:
    """Attention of each query over the tokens of its chosen pools and its tail.

    Keeps its inputs for backward and computes the rest again. Working memory: one chunk of queries,
    about 256 MiB, whatever T is, and ``latent`` in float32.

    Args:
        q: (T, heads, d_qk).
        latent: (T, r), the normalised latent that keys and values are maps of.
        kv_b: (heads * (d_qk + d_v), r); per head first the rows of the key, then of the value.
        pools: int32 (T, n), from ``kernels.dsa.select.select_pools``.
        position: int64 (T,), distance from the start of the document.
        start: int64 (T,), flat index of the document's first token.
        size: tokens per pool.
        scale: factor on the logits.

    Returns:
        (T, heads, d_v) in the dtype of ``q``.
    """
    return _SparseMla.apply(q, latent, kv_b, pools, position, start, size, scale)


def _split(
    kv_b: torch.Tensor, latent: torch.Tensor, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The maps to keys and to values, (heads, d, r) each, and the latent; in full precision."""
    wide = accumulation_dtype(latent.dtype)
    heads, d_qk = q.shape[1:]
    per_head = kv_b.to(wide).view(heads, -1, kv_b.shape[1])
    return per_head[:, :d_qk], per_head[:, d_qk:], latent.to(wide)


def _chunks(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_key: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    size: int,
    scale: float,
) -> Iterator[tuple[slice, _Chunk]]:
    """Walk through the queries, a slice and a ``_Chunk`` at a time."""
    slots = pools.shape[1] * size + size - 1
    per_query = slots * (2 * latent.shape[1] + 4 * q.shape[1]) * latent.element_size()
    step = max(1, _CHUNK_BYTES // max(1, per_query))
    for begin in range(0, q.shape[0], step):
        rows = slice(begin, begin + step)
        tokens, used = selected_tokens(pools[rows], position[rows], start[rows], size)
        yield rows, _Chunk(q[rows], latent, w_key, tokens, used, scale)
