"""Scores of pools in Triton, and the best of every 16 of them: any CUDA device.

A program owns some queries with all their heads and walks over tiles of pools. Products have pools
as rows and heads as columns, so that a sum over heads stays within a few threads.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.indexer.windows import GROUP, TILE, Window, Workspace

COLUMNS = 256
"""Queries times heads of one program."""
_SEGMENT = 1024
"""Pools that one program walks over: enough to pay for its queries, few enough to balance."""


@triton.jit
def _higher(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["q0", "q1", "p0", "width", "pools"])
def _scores_kernel(  # type: ignore[no-untyped-def]
    queries, weights, keys, first, end, scores, best, scale, q0, q1, p0, width, segment,
    key_factors, pools,
    HEADS: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, POOLS: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    query = q0 + tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inside = query < q1
    lowest = tl.load(first + query, mask=inside, other=0x7FFFFFFF)
    highest = tl.load(end + query, mask=inside, other=0)
    piece = p0 + tl.program_id(1) * segment
    begin = tl.maximum(tl.min(lowest, 0) // POOLS * POOLS, piece)
    stop = tl.minimum(tl.max(highest, 0), piece + segment)
    if begin >= stop:
        return

    column = tl.arange(0, QUERIES * HEADS)
    row = (q0 + tl.program_id(0) * QUERIES).to(tl.int64) * HEADS + column
    real = row < q1.to(tl.int64) * HEADS
    channel = tl.arange(0, DIM)
    q = tl.load(queries + row[:, None] * DIM + channel[None, :], mask=real[:, None], other=0.0)
    # The scale is above zero, so it may follow the relu.
    w = tl.load(weights + row, mask=real, other=0.0) * scale

    local = (query - q0).to(tl.int64)
    to_score = scores + local[None, :] * width
    to_best = best + local[None, :] * (width // GROUP)
    for pool in tl.range(begin, stop, POOLS, num_stages=STAGES):
        products = tl.dot(keys.load([pool, 0]), q.T)
        # A nan has to come through, which max drops unless told.
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
        score = tl.sum(tl.reshape(products, (POOLS, QUERIES, HEADS)), 2)
        at = pool + tl.arange(0, POOLS)
        if key_factors is not None:
            score *= tl.load(key_factors + at, mask=at < pools, other=0.0)[:, None]
        tl.store(to_score + (at - p0)[:, None], score, mask=inside[None, :])
        open_ = (at[:, None] >= lowest[None, :]) & (at[:, None] < highest[None, :])
        score = tl.where(open_, score, float("-inf"))
        top = tl.reduce(tl.reshape(score, (POOLS // GROUP, GROUP, QUERIES)), 1, _higher)
        group = (pool - p0) // GROUP + tl.arange(0, POOLS // GROUP)
        tl.store(to_best + group[:, None], top, mask=inside[None, :])


def write_scores(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    space: Workspace,
    window: Window,
    scale: float,
    key_factors: torch.Tensor | None = None,
) -> None:
    """Fill ``space.scores`` and ``space.best`` where a query of the window may choose.

    Args:
        queries: (Q, heads, d), contiguous; see ``op.refusal`` for dtypes, heads and d.
        weights: float32 (Q, heads), contiguous.
        keys: (P, d), contiguous, P >= 1, of the same dtype; like queries, 16-byte aligned.
        first, end: int32 (Q,), which pools each query may choose.
        space, window: see ``windows``. Other places of ``space`` get any value.
        scale: factor on the products, above 0.
        key_factors: None, or float32 (P,) above 0, contiguous: factors on the scores of pools.
    """
    heads, dim = queries.shape[1:]
    grid = (
        triton.cdiv(window.q1 - window.q0, COLUMNS // heads),
        triton.cdiv(window.width, _SEGMENT),
    )
    # Of a single key the stride may be anything.
    tiles = TensorDescriptor(keys, list(keys.shape), [dim, 1], [TILE, dim])
    _scores_kernel[grid](
        queries, weights, tiles, first, end,
        space.scores, space.best, scale, window.q0, window.q1, window.p0, window.width,
        segment=_SEGMENT, key_factors=key_factors, pools=len(keys), HEADS=heads, DIM=dim,
        QUERIES=COLUMNS // heads, POOLS=TILE, GROUP=GROUP, STAGES=2, num_warps=4,
    )  # fmt: skip
