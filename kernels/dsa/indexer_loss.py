"""Kullback-Leibler divergence between the attention's mass per pool and the indexer's scores.

DeepSeek-V3.2 (arXiv 2512.02556, section 2.1.1) trains its indexer this way over single tokens. Here
both distributions are over pools: a pool's target is the probability of its tokens, summed over the
heads. The tail has no score and is left out of both before they are normalised.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kernels.dsa import absorbed
from kernels.dsa.absorbed import Selected, split_maps
from kernels.dsa.pooling import Pools
from kernels.dsa.select import windows
from kernels.packed import bounds
from kernels.precision import accumulation_dtype

Support = Literal["selected", "visible"]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of an indexer's queries, weights and keys."""


@dataclass(frozen=True)
class Teacher:
    """The attention whose mass is the target; no gradient reaches it.

    Attributes:
        q: (T, heads, d_qk).
        latent: (T, r).
        kv_b: (heads * (d_qk + d_v), r).
        chosen: int32 (T, n), pools that the queries attended to.
        position: int64 (T,).
        start: int64 (T,).
        lengths: tokens of the documents.
        size: tokens per pool.
        scale: factor on the logits.
    """

    q: torch.Tensor
    latent: torch.Tensor
    kv_b: torch.Tensor
    chosen: torch.Tensor
    position: torch.Tensor
    start: torch.Tensor
    lengths: tuple[int, ...]
    size: int
    scale: float


@dataclass(frozen=True)
class _Chunk:
    """Queries ``rows`` and the pools ``columns`` (numbered through the batch) of each.

    ``columns`` is (Q, C), or (C,) when all queries share them; ``open_`` says which are meant, and
    ``target`` is the distribution over them; both (Q, C). Rows without a target are all zero.
    """

    rows: slice
    columns: torch.Tensor
    open_: torch.Tensor
    target: torch.Tensor


def indexer_kl(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    pools: Pools,
    teacher: Teacher,
    scale: float,
    support: Support,
) -> torch.Tensor:
    """Sum over queries of KL(target || softmax of the indexer's scores).

    A query without a complete pool counts nothing. Keeps its inputs for backward and works through
    the queries again, about 256 MiB at a time.

    Args:
        queries: (T, index heads, d), differentiable.
        weights: (T, index heads) float32, differentiable.
        keys: (P, d), one per pool, differentiable.
        pools: their numbering.
        teacher: the attention.
        scale: factor on every product of query and key.
        support: "selected": the pools that the attention saw. "visible": all complete pools up to
            the query, under dense attention; quadratic in the length of a document.

    Returns:
        A scalar in float32 (float64 for float64).
    """
    return _IndexerKl.apply(queries, weights, keys, pools, teacher, scale, support)


class _IndexerKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        pools: Pools,
        teacher: Teacher,
        scale: float,
        support: Support,
    ) -> torch.Tensor:
        ctx.save_for_backward(queries, weights, keys, *_tensors(teacher))
        ctx.rest = pools, teacher.lengths, teacher.size, teacher.scale, scale, support
        total = weights.new_zeros(())
        for chunk in _chunks(teacher, pools, support):
            q, w = queries[chunk.rows], weights[chunk.rows]
            total += _divergence(q, w, keys[chunk.columns], chunk, scale)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        queries, weights, keys, q, latent, kv_b, chosen, position, start = ctx.saved_tensors
        pools, lengths, size, teacher_scale, scale, support = ctx.rest
        teacher = Teacher(
            q=q, latent=latent, kv_b=kv_b, chosen=chosen, position=position, start=start,
            lengths=lengths, size=size, scale=teacher_scale,
        )  # fmt: skip
        chunks = _chunks(teacher, pools, support)
        _, grads = _differentiated(queries, weights, keys, chunks, scale, grad)
        return *grads, *(None,) * 4


def indexer_kl_of_mass(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    pools: Pools,
    chosen: torch.Tensor,
    mass: torch.Tensor,
    scale: float,
    factor: float,
) -> tuple[torch.Tensor, Gradients]:
    """``indexer_kl`` over the selected pools, with gradients, where the attention is known already.

    Working memory: one chunk of queries, about 256 MiB, and the keys' gradient in the dtype of
    ``weights``.

    Args:
        queries, weights, keys, pools, scale: as for ``indexer_kl``; no graph is made.
        chosen: int32 (T, n), pools that the queries attended to.
        mass: (T, n) in the dtype of ``weights``, each pool's probability summed over the heads.
        factor: on the gradients.

    Returns:
        The divergence, a scalar; ``factor`` times its gradients by queries, weights and keys, in
        their dtypes.
    """
    chunks = _mass_chunks(chosen, mass, pools, queries_at_once(queries, chosen.shape[1]))
    pull = weights.new_full((), factor)
    return _differentiated(queries, weights, keys, chunks, scale, pull)


def queries_at_once(queries: torch.Tensor, chosen: int) -> int:
    """How many queries (T, heads, d) of ``chosen`` pools fit ``absorbed.CHUNK_BYTES``.

    Of each pool keys and their gradient, (d,) three times, and per head products, rectified and
    weighted ones and the gradients of all, exist in full precision.
    """
    heads, width = queries.shape[1:]
    wide = accumulation_dtype(queries.dtype).itemsize
    return max(1, absorbed.CHUNK_BYTES // max(1, chosen * (3 * width + 6 * heads) * wide))


def _differentiated(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    chunks: Iterator[_Chunk],
    scale: float,
    pull: torch.Tensor,
) -> tuple[torch.Tensor, Gradients]:
    """The divergence, and its gradients times the scalar ``pull``."""
    total = weights.new_zeros(())
    grad_q, grad_w = torch.zeros_like(queries), torch.zeros_like(weights)
    grad_k = torch.zeros_like(keys, dtype=weights.dtype)
    for chunk in chunks:
        # Keys in full precision: their gradients are summed over queries before rounding.
        wide_keys = keys[chunk.columns].to(weights.dtype)
        parts = queries[chunk.rows], weights[chunk.rows], wide_keys
        some_q, some_w, some_k = (part.detach().requires_grad_() for part in parts)
        with torch.enable_grad():
            loss = _divergence(some_q, some_w, some_k, chunk, scale)
        dq, dw, dk = torch.autograd.grad(loss, (some_q, some_w, some_k), pull)
        total += loss.detach()
        grad_q[chunk.rows], grad_w[chunk.rows] = dq, dw
        grad_k.index_add_(0, chunk.columns.flatten(), dk.flatten(0, -2))
    return total, (grad_q, grad_w, grad_k.to(keys.dtype))


def _tensors(teacher: Teacher) -> tuple[torch.Tensor, ...]:
    t = teacher
    return t.q, t.latent, t.kv_b, t.chosen, t.position, t.start


def _divergence(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, chunk: _Chunk, scale: float
) -> torch.Tensor:
    """``keys`` are (C, d), or (Q, C, d) when each query has its own."""
    wide = weights.dtype
    products = queries.to(wide) @ keys.to(wide).transpose(-1, -2) * scale
    scores = (weights.unsqueeze(-1) * products.relu()).sum(1)
    student = scores.masked_fill(~chunk.open_, float("-inf")).log_softmax(-1)
    # Both logarithms are -inf only where the target is zero: such terms are zero, not nan.
    used = chunk.target > 0
    log_target = torch.where(used, chunk.target, 1.0).log()
    return (chunk.target * (log_target - torch.where(used, student, 0.0))).sum()


def _chunks(teacher: Teacher, pools: Pools, support: Support) -> Iterator[_Chunk]:
    walk = _selected_chunks if support == "selected" else _visible_chunks
    return walk(teacher, pools)


def _normalised(mass: torch.Tensor, open_: torch.Tensor) -> torch.Tensor:
    mass = mass.masked_fill(~open_, 0.0)
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp(min=torch.finfo(mass.dtype).tiny), 0.0)


def _selected_chunks(teacher: Teacher, pools: Pools) -> Iterator[_Chunk]:
    t = teacher
    if t.chosen.shape[1] == 0:
        return
    latent, w_key = _teacher_maps(t)
    slots = t.chosen.shape[1] * t.size + t.size - 1
    step = absorbed.queries_at_once(slots, latent.shape[1], t.q.shape[1], latent.element_size())
    for begin in range(0, t.chosen.shape[0], step):
        rows = slice(begin, begin + step)
        ids = t.chosen[rows]
        of_rows = t.q[rows], latent, w_key, ids, t.position[rows], t.start[rows]
        mass = Selected(*of_rows, t.size, t.scale).probabilities.sum(1)
        mass = mass[:, : ids.shape[1] * t.size].unflatten(1, (-1, t.size)).sum(-1)
        yield _of_pools(rows, ids, mass, pools)


def _mass_chunks(
    chosen: torch.Tensor, mass: torch.Tensor, pools: Pools, step: int
) -> Iterator[_Chunk]:
    if chosen.shape[1] == 0:
        return
    for begin in range(0, chosen.shape[0], step):
        rows = slice(begin, begin + step)
        yield _of_pools(rows, chosen[rows], mass[rows], pools)


def _of_pools(rows: slice, ids: torch.Tensor, mass: torch.Tensor, pools: Pools) -> _Chunk:
    """The chosen pools ``ids`` (Q, n) of queries ``rows``, and their share of the attention."""
    columns = torch.where(ids >= 0, pools.before[rows].unsqueeze(1) + ids, 0)
    return _Chunk(rows, columns, ids >= 0, _normalised(mass, ids >= 0))


def _visible_chunks(teacher: Teacher, pools: Pools) -> Iterator[_Chunk]:
    t = teacher
    latent, w_key = _teacher_maps(t)
    begins = bounds(t.lengths)
    for q0, q1, p0, p1 in windows(
        t.lengths, t.size, 3 * t.q.shape[1] * t.size * latent.element_size()
    ):
        if p1 == p0:
            continue
        rows = slice(q0, q1)
        # Every open token lies between the start of the first query's document and the last query.
        t0 = begins[bisect.bisect_right(begins, q0) - 1]
        token = torch.arange(t0, q1, device=latent.device)
        start, seen = t.start[rows, None], t.position[rows, None] + 1
        q = torch.einsum("qhd,hdr->qhr", t.q[rows].to(latent.dtype), w_key)
        logits = torch.einsum("qhr,kr->qhk", q, latent[t0:q1]) * t.scale
        hidden = (token < start) | (token >= start + seen)
        mass = logits.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1).sum(1)
        inside = pools.first[p0:p1, None] - t0 + torch.arange(t.size, device=latent.device)
        column = torch.arange(p0, p1, device=latent.device)
        first = pools.before[rows, None]
        open_ = (column >= first) & (column < first + seen // t.size)
        yield _Chunk(rows, column, open_, _normalised(mass[:, inside].sum(-1), open_))


def _teacher_maps(teacher: Teacher) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent (T, r) and the maps to keys (heads, d_qk, r), in full precision."""
    wide = teacher.latent.to(accumulation_dtype(teacher.latent.dtype))
    return wide, split_maps(teacher.kv_b, *teacher.q.shape[1:])[0]
