"""Sparse latent attention and its gradients in plain torch: what the kernels are held against.

Absorbed form: every head attends to the same latent rows, which are keys and, but for a tail of
columns, values. DeepSeek-V3.2, arXiv 2512.02556, section 2.1, over pools instead of tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.dsa.keys import selected_tokens
from kernels.precision import accumulation_dtype

_CHUNK_BYTES = 256 * 2**20


class _Chunk(NamedTuple):
    rows: slice
    tokens: torch.Tensor
    """int64 (c, K), flat."""
    used: torch.Tensor
    """bool (c, K)."""
    q: torch.Tensor
    """(c, H, d), in the dtype of the computation."""
    keys: torch.Tensor
    """(c, K, d), zero in unused slots."""
    logits: torch.Tensor
    """(c, H, K), scaled, -inf in unused slots."""


def _chunks(
    q: torch.Tensor,
    latent: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    size: int,
    scale: float,
    upcast: bool,
) -> Iterator[_Chunk]:
    wide = accumulation_dtype(q.dtype) if upcast else q.dtype
    slots = pools.shape[1] * size + size - 1
    per_query = slots * (2 * latent.shape[1] + 4 * q.shape[1]) * 4
    step = max(1, _CHUNK_BYTES // max(1, per_query))
    for begin in range(0, q.shape[0], step):
        rows = slice(begin, begin + step)
        tokens, used = selected_tokens(pools[rows], position[rows], start[rows], size)
        # An unused slot points at the document's first token, which a query may not have.
        tokens = tokens.clamp(max=latent.shape[0] - 1)
        keys = latent[tokens].to(wide).masked_fill(~used.unsqueeze(2), 0)
        queries = q[rows].to(wide)
        logits = torch.einsum("qhd,qkd->qhk", queries, keys) * scale
        logits = logits.masked_fill(~used.unsqueeze(1), float("-inf"))
        yield _Chunk(rows, tokens, used, queries, keys, logits)


def forward_reference(
    q: torch.Tensor,
    latent: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    *,
    size: int,
    scale: float,
    tail: int = 0,
    upcast: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query to the tokens of its pools and of its unfinished pool.

    Memory: a chunk of queries, about 256 MiB.

    Args:
        q: (Q, H, d + tail), any float dtype.
        latent: (T, d + tail), rows that are keys; their first d columns are the values.
        pools: int32 (Q, n), chosen pools counted from the document's start, ascending, then -1.
        position: int (Q,), distance from the document's start; -1 for a query without keys.
        start: int (Q,), flat index of the document's first token.
        size: tokens per pool.
        scale: factor on the logits.
        tail: columns that only queries and keys have.
        upcast: compute in ``accumulation_dtype``; otherwise in the dtype of ``q``.

    Returns:
        (Q, H, d) in the dtype of ``q``, and (Q, H), natural logarithms of the sums of exponentials
        in ``accumulation_dtype``. A query without keys has zeros and -inf.
    """
    out = q.new_zeros(*q.shape[:2], q.shape[2] - tail)
    lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
    for chunk in _chunks(q, latent, pools, position, start, size, scale, upcast):
        lse[chunk.rows] = chunk.logits.to(lse.dtype).logsumexp(-1)
        probabilities = chunk.logits.softmax(-1).nan_to_num(0.0)
        values = chunk.keys[..., : out.shape[2]]
        out[chunk.rows] = torch.einsum("qhk,qkd->qhd", probabilities, values).to(out.dtype)
    return out, lse


def backward_reference(
    q: torch.Tensor,
    latent: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    grad: torch.Tensor,
    *,
    size: int,
    scale: float,
    tail: int = 0,
    upcast: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``forward_reference`` and the probabilities of the pools.

    Args:
        q, latent, pools, position, start, size, scale, tail, upcast: as in the forward.
        grad: (Q, H, d), gradient of the output.

    Returns:
        dq (Q, H, d + tail) in the dtype of ``q``; the gradient of ``latent`` in
        ``accumulation_dtype``; (Q, n) in ``accumulation_dtype``, each pool's probability summed
        over heads, 0 where there is none.
    """
    wide = accumulation_dtype(q.dtype)
    dq = torch.zeros_like(q)
    dlatent = torch.zeros_like(latent, dtype=wide)
    mass = torch.zeros(pools.shape, dtype=wide, device=pools.device)
    for chunk in _chunks(q, latent, pools, position, start, size, scale, upcast):
        dout = grad[chunk.rows].to(chunk.keys.dtype)
        values = chunk.keys[..., : grad.shape[2]]
        p = chunk.logits.softmax(-1).nan_to_num(0.0)
        dp = torch.einsum("qhd,qkd->qhk", dout, values)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[chunk.rows] = torch.einsum("qhk,qkd->qhd", ds, chunk.keys).to(dq.dtype)
        dkeys = torch.einsum("qhk,qhd->qkd", ds, chunk.q)
        dkeys[..., : grad.shape[2]] += torch.einsum("qhk,qhd->qkd", p, dout)
        dlatent.index_add_(0, chunk.tokens.flatten(), dkeys.to(wide).flatten(0, 1))
        in_pools = p.to(wide).sum(1)[:, : pools.shape[1] * size]
        mass[chunk.rows] = in_pools.unflatten(1, (pools.shape[1], size)).sum(2)
    return dq, dlatent, mass
