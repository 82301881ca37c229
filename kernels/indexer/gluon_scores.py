"""Scores of pools for Hopper's tensor cores, in Gluon, and the best of every 16 of them.

A program owns some queries with all their heads, together the 256 columns of one wgmma, and walks
over tiles of 64 pools, the rows. That way round a thread of the tensor core holds many heads of two
pools: the sum over heads is additions in registers, then one exchange among four neighbours. A warp
holds 16 pools, so that their best is cheap too. Two programs share a multiprocessor, so that one
adds up while the other multiplies; a tile is fetched while the two before it are worked on.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.indexer.windows import GROUP, TILE, Window, Workspace

COLUMNS = 256
"""Queries times heads of one program."""
_SEGMENT = 1024
"""Pools that one program walks over: enough to pay for its queries, few enough to balance."""
_WARPS = 4
_ALL = tl.constexpr(tl.PropagateNan.ALL)


@gluon.constexpr_function
def _products_layout(columns):  # type: ignore[no-untyped-def]
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def _partial_layout(queries):  # type: ignore[no-untyped-def]
    """Pools x queries x the four partial sums of four neighbouring threads, all in one thread."""
    queries = gl._unwrap_if_constexpr(queries)
    far = [[0, bit, 0] for bit in (4, 8, 16) if bit < queries]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0], *far],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, queries, 4],
    )


@gluon.jit
def _higher(a, b):  # type: ignore[no-untyped-def]
    return gl.maximum(a, b, propagate_nan=_ALL)


@gluon.jit
def _halves(x):  # type: ignore[no-untyped-def]
    """Even and odd members of the last dimension."""
    n: gl.constexpr = x.shape[3]
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], n // 2, 2]))


@gluon.jit
def _add_heads(x, w, total):  # type: ignore[no-untyped-def]
    """total + sum over the last dimension of w * relu(x), one fused multiply-add a head."""
    if x.shape[3] == 1:
        shape: gl.constexpr = [x.shape[0], x.shape[1], x.shape[2]]
        # A nan has to come through, which maximum drops unless told.
        live = gl.maximum(gl.reshape(x, shape), 0.0, propagate_nan=_ALL)
        if total is None:
            return live * gl.reshape(w, shape)
        else:
            return gl.fma(live, gl.reshape(w, shape), total)
    else:
        x_even, x_odd = _halves(x)
        w_even, w_odd = _halves(w)
        return _add_heads(x_odd, w_odd, _add_heads(x_even, w_even, total))


@gluon.jit
def _by_thread(x, QUERIES: gl.constexpr, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Pools x queries x 4 threads x the heads that each of them holds."""
    pools: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, [pools, QUERIES, HEADS // 8, 4, 2]), [0, 1, 3, 2, 4])
    return gl.reshape(x, [pools, QUERIES, 4, HEADS // 4])


@gluon.jit(do_not_specialize=["q0", "q1", "p0", "width"])
def _scores_kernel(  # type: ignore[no-untyped-def]
    queries, weights, keys, first, end, scores, best, scale, q0, q1, p0, width, segment,
    HEADS: gl.constexpr, DIM: gl.constexpr, QUERIES: gl.constexpr, POOLS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    products: gl.constexpr = _products_layout(QUERIES * HEADS)
    partial: gl.constexpr = _partial_layout(QUERIES)
    summed: gl.constexpr = gl.SliceLayout(2, partial)

    query0 = gl.program_id(0) * QUERIES
    query = q0 + query0 + gl.arange(0, QUERIES, gl.SliceLayout(0, summed))
    inside = query < q1
    lowest = gl.load(first + query, mask=inside, other=0x7FFFFFFF)
    highest = gl.load(end + query, mask=inside, other=0)
    piece = p0 + gl.program_id(1) * segment
    begin = gl.maximum(gl.min(lowest, 0) // POOLS * POOLS, piece)
    stop = gl.minimum(gl.max(highest, 0), piece + segment)
    if begin >= stop:
        return

    row = (q0 + query0) * HEADS
    q_tile = gl.allocate_shared_memory(queries.dtype, [QUERIES * HEADS, DIM], queries.layout)
    k_tiles = gl.allocate_shared_memory(queries.dtype, [2, POOLS, DIM], keys.layout)
    arrived = mbarrier.allocate_mbarrier(batch=3)
    for i in gl.static_range(3):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(arrived.index(2), queries.nbytes_per_cta)
    tma.async_load(queries, [row, 0], arrived.index(2), q_tile)
    for i in gl.static_range(2):
        there = begin + i * POOLS < stop
        mbarrier.expect(arrived.index(i), keys.nbytes_per_cta, pred=there)
        tma.async_load(keys, [begin + i * POOLS, 0], arrived.index(i), k_tiles.index(i), pred=there)

    column = gl.arange(0, QUERIES * HEADS, gl.SliceLayout(0, products))
    # The scale is above zero, so it may follow the relu.
    real = row + column < q1 * HEADS
    w = gl.load(weights + row + column, mask=real, other=0.0) * scale
    zeros = gl.zeros([POOLS, QUERIES * HEADS], gl.float32, products)
    w = _by_thread(gl.broadcast(gl.expand_dims(w, 0), zeros)[0], QUERIES, HEADS)

    pool = gl.arange(0, POOLS, gl.SliceLayout(1, summed))
    to_score = (query - q0).to(gl.int64) * width
    to_score = scores + gl.expand_dims(to_score, 0) + gl.expand_dims(pool - p0, 1)
    mbarrier.wait(arrived.index(2), 0)
    for at in range(begin, stop, POOLS):
        tile = (at - begin) // POOLS
        slot = tile & 1
        mbarrier.wait(arrived.index(slot), (tile >> 1) & 1)
        x = warpgroup_mma(
            k_tiles.index(slot), q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        x = warpgroup_mma_wait(0, deps=[x])
        gl.barrier()
        ahead = at + 2 * POOLS < stop
        mbarrier.expect(arrived.index(slot), keys.nbytes_per_cta, pred=ahead)
        tma.async_load(
            keys, [at + 2 * POOLS, 0], arrived.index(slot), k_tiles.index(slot), pred=ahead
        )
        part = _add_heads(_by_thread(x, QUERIES, HEADS), w, None)
        score = gl.sum(gl.convert_layout(part, partial), 2)
        gl.store(to_score + at, score, mask=gl.expand_dims(inside, 0))

        open_ = gl.expand_dims(pool, 1) + at
        open_ = (open_ >= gl.expand_dims(lowest, 0)) & (open_ < gl.expand_dims(highest, 0))
        score = gl.where(open_, score, float("-inf"))
        top = gl.reduce(gl.reshape(score, [POOLS // GROUP, GROUP, QUERIES]), 1, _higher)
        place = (at - p0) // GROUP + gl.arange(
            0, POOLS // GROUP, gl.SliceLayout(1, top.type.layout)
        )
        nth = query0 + gl.arange(0, QUERIES, gl.SliceLayout(0, top.type.layout))
        to_best = nth.to(gl.int64) * (width // GROUP)
        gl.store(
            best + gl.expand_dims(to_best, 0) + gl.expand_dims(place, 1),
            top,
            mask=gl.expand_dims(nth < q1 - q0, 0),
        )


def _descriptor(rows: torch.Tensor, block: int) -> TensorDescriptor:
    shape = [block, rows.shape[1]]
    dtype = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), shape, layout)


def write_scores(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    space: Workspace,
    window: Window,
    scale: float,
) -> None:
    """See ``triton_scores.write_scores``."""
    heads, dim = queries.shape[1:]
    grid = (
        triton.cdiv(window.q1 - window.q0, COLUMNS // heads),
        triton.cdiv(window.width, _SEGMENT),
    )
    _scores_kernel[grid](
        _descriptor(queries.flatten(0, 1), COLUMNS), weights, _descriptor(keys, TILE), first, end,
        space.scores, space.best, scale, window.q0, window.q1, window.p0, window.width,
        segment=_SEGMENT, HEADS=heads, DIM=dim, QUERIES=COLUMNS // heads, POOLS=TILE, GROUP=GROUP,
        num_warps=_WARPS,
    )  # fmt: skip
