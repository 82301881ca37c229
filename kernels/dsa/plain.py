"""Sparse multi-head latent attention without positions in plain torch, exact and memory-bounded.

Internally float32 (float64 for float64 inputs). DeepSeek-V3.2 (arXiv 2512.02556, section 2.1)
defines it over single tokens; here they come in pools.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.dsa import absorbed
from kernels.dsa.absorbed import Selected, split_maps
from kernels.precision import accumulation_dtype


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
        return attend(q, latent, kv_b, pools, position, start, size=size, scale=scale)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Once: a recomputed layer gives them out once.
        tensors = ctx.saved_tensors
        grad_q, grad_latent, grad_kv_b = attend_backward(
            grad_out, *tensors, size=ctx.size, scale=ctx.scale
        )
        return grad_q, grad_latent.to(tensors[1].dtype), grad_kv_b, *(None,) * 5


def attend(
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
    """``sparse_mla`` without a graph. Queries may be fewer than the tokens of ``latent``."""
    w_key, w_value = split_maps(kv_b, *q.shape[1:])
    wide = latent.to(accumulation_dtype(latent.dtype))
    out = q.new_empty(*q.shape[:2], w_value.shape[1])
    for rows, chunk in _chunks(q, wide, w_key, pools, position, start, size, scale):
        mixed = torch.einsum("qhk,qkr->qhr", chunk.probabilities, chunk.keys)
        out[rows] = torch.einsum("qhr,hvr->qhv", mixed, w_value).to(out.dtype)
    return out


def attend_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    *,
    size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``attend``'s q, latent and kv_b, given its result's.

    That of the latent is not rounded: it is float32 (float64 for float64), for sums over ranks.
    """
    w_key, w_value = split_maps(kv_b, *q.shape[1:])
    wide = latent.to(accumulation_dtype(latent.dtype))
    grad_q = torch.empty_like(q)
    grad_latent = torch.zeros_like(wide)
    grad_w_key, grad_w_value = torch.zeros_like(w_key), torch.zeros_like(w_value)
    for rows, c in _chunks(q, wide, w_key, pools, position, start, size, scale):
        grad = grad_out[rows].to(wide.dtype)
        mixed = torch.einsum("qhk,qkr->qhr", c.probabilities, c.keys)
        grad_w_value += torch.einsum("qhv,qhr->hvr", grad, mixed)
        grad_mixed = torch.einsum("qhv,hvr->qhr", grad, w_value)
        grad_p = torch.einsum("qhr,qkr->qhk", grad_mixed, c.keys)
        inner = (grad_mixed * mixed).sum(-1, keepdim=True)
        grad_logits = c.probabilities * (grad_p - inner) * scale
        grad_absorbed = torch.einsum("qhk,qkr->qhr", grad_logits, c.keys)
        grad_q[rows] = torch.einsum("qhr,hdr->qhd", grad_absorbed, w_key).to(q.dtype)
        grad_w_key += torch.einsum("qhd,qhr->hdr", c.q, grad_absorbed)
        grad_keys = torch.einsum("qhk,qhr->qkr", c.probabilities, grad_mixed)
        grad_keys += torch.einsum("qhk,qhr->qkr", grad_logits, c.absorbed)
        grad_latent.index_add_(0, c.tokens.flatten(), grad_keys.flatten(0, 1))
    grad_kv_b = torch.cat([grad_w_key, grad_w_value], 1).flatten(0, 1).to(kv_b.dtype)
    return grad_q, grad_latent, grad_kv_b


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


def _chunks(
    q: torch.Tensor,
    latent: torch.Tensor,
    w_key: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    size: int,
    scale: float,
) -> Iterator[tuple[slice, Selected]]:
    """Walk through the queries, a slice and what it selected at a time."""
    slots = pools.shape[1] * size + size - 1
    step = absorbed.queries_at_once(slots, latent.shape[1], q.shape[1], latent.element_size())
    for begin in range(0, q.shape[0], step):
        rows = slice(begin, begin + step)
        of_rows = pools[rows], position[rows], start[rows]
        yield rows, Selected(q[rows], latent, w_key, *of_rows, size, scale)
