"""Scores of pools for Hopper's tensor cores, in Gluon, and the best of every 16 of them.

A program owns some queries with all their heads, together 256 columns, and walks over tiles of 64
pools, the rows. That way round a thread of the tensor core holds many heads of two pools: the sum
over heads is additions in registers, then one exchange among four neighbours. A warp holds 16
pools, so that their best is cheap too. Half of the columns are multiplied at a time, so that the
next half is multiplied while one is added up; two programs share a multiprocessor besides. A tile
is fetched while the one before it is worked on.
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
_SEGMENT = 2048
"""Pools that one program walks over: enough to pay for its queries, few enough to balance."""
_WARPS = 4
_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}
_ALL = tl.constexpr(tl.PropagateNan.ALL)


@gluon.constexpr_function
def _products_layout(columns, bits):  # type: ignore[no-untyped-def]
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // bits]
    )


@gluon.constexpr_function
def _partial_layout(queries):  # type: ignore[no-untyped-def]
    """Pools x queries x the four partial sums of four neighbouring threads, all in one thread."""
    queries = gl._unwrap_if_constexpr(queries)
    far = [[0, bit, 0] for bit in (4, 8) if bit < queries]
    near = [[0, 1, 0], [0, 2 if queries > 2 else 0, 0]]  # of two queries neighbours hold the same
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0], *far],
        lane_bases=[*near, [1, 0, 0], [2, 0, 0], [4, 0, 0]],
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


@gluon.jit
def _multiply(k_tile, q_half, BITS: gl.constexpr):  # type: ignore[no-untyped-def]
    columns: gl.constexpr = q_half.shape[0]
    zeros = gl.zeros([k_tile.shape[0], columns], gl.float32, _products_layout(columns, BITS))
    return warpgroup_mma(k_tile, q_half.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _weights_by_thread(  # type: ignore[no-untyped-def]
    weights, row, stop, scale, QUERIES: gl.constexpr, HEADS: gl.constexpr, BITS: gl.constexpr
):  # fmt: skip
    products: gl.constexpr = _products_layout(QUERIES * HEADS, BITS)
    column = row + gl.arange(0, QUERIES * HEADS, gl.SliceLayout(0, products))
    w = gl.load(weights + column, mask=column < stop, other=0.0)
    # The scale is above zero, so it may follow the relu.
    w = gl.expand_dims(w * scale, 0)
    shape = gl.zeros([64, QUERIES * HEADS], gl.float32, products)
    return _by_thread(gl.broadcast(w, shape)[0], QUERIES, HEADS)


@gluon.jit
def _finish(  # type: ignore[no-untyped-def]
    x, w, lowest, highest, scores, best, query0, stop, at, p0, width, key_factors, pools,
    QUERIES: gl.constexpr, HEADS: gl.constexpr, POOLS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Add up heads; store the scores of pools from ``at`` and of queries from ``query0``, which
    count from the window's first one, and the best of every ``GROUP``."""
    partial: gl.constexpr = _partial_layout(QUERIES)
    summed: gl.constexpr = gl.SliceLayout(2, partial)
    part = _add_heads(_by_thread(x, QUERIES, HEADS), w, None)
    score = gl.sum(gl.convert_layout(part, partial), 2)
    pool = gl.arange(0, POOLS, gl.SliceLayout(1, summed))
    if key_factors is not None:
        factor = gl.load(key_factors + (pool + at), mask=pool + at < pools, other=0.0)
        score = score * gl.expand_dims(factor, 1)
    query = query0 + gl.arange(0, QUERIES, gl.SliceLayout(0, summed))
    to_score = scores + gl.expand_dims(query.to(gl.int64) * width, 0)
    to_score += gl.expand_dims(pool - p0, 1)
    gl.store(to_score + at, score, mask=gl.expand_dims(query < stop, 0))

    open_ = gl.expand_dims(pool, 1) + at
    open_ = (open_ >= gl.expand_dims(lowest, 0)) & (open_ < gl.expand_dims(highest, 0))
    score = gl.where(open_, score, float("-inf"))
    top = gl.reduce(gl.reshape(score, [POOLS // GROUP, GROUP, QUERIES]), 1, _higher)
    place = (at - p0) // GROUP + gl.arange(0, POOLS // GROUP, gl.SliceLayout(1, top.type.layout))
    nth = query0 + gl.arange(0, QUERIES, gl.SliceLayout(0, top.type.layout))
    to_best = best + gl.expand_dims(nth.to(gl.int64) * (width // GROUP), 0)
    gl.store(to_best + gl.expand_dims(place, 1), top, mask=gl.expand_dims(nth < stop, 0))


@gluon.jit(do_not_specialize=["q0", "q1", "p0", "width", "pools"])
def _scores_kernel(  # type: ignore[no-untyped-def]
    queries, weights, keys, first, end, scores, best, scale, q0, q1, p0, width, segment,
    key_factors, pools, HEADS: gl.constexpr, DIM: gl.constexpr, QUERIES: gl.constexpr,
    POOLS: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    # QUERIES are those of a half.
    by_query: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, _partial_layout(QUERIES)))
    query_a = gl.program_id(0) * (2 * QUERIES)
    query_b = query_a + QUERIES
    a_query = q0 + query_a + gl.arange(0, QUERIES, by_query)
    b_query = a_query + QUERIES
    lowest_a = gl.load(first + a_query, mask=a_query < q1, other=0x7FFFFFFF)
    lowest_b = gl.load(first + b_query, mask=b_query < q1, other=0x7FFFFFFF)
    highest_a = gl.load(end + a_query, mask=a_query < q1, other=0)
    highest_b = gl.load(end + b_query, mask=b_query < q1, other=0)
    piece = p0 + gl.program_id(1) * segment
    lowest = gl.minimum(gl.min(lowest_a, 0), gl.min(lowest_b, 0))
    highest = gl.maximum(gl.max(highest_a, 0), gl.max(highest_b, 0))
    begin = gl.maximum(lowest // POOLS * POOLS, piece)
    stop = gl.minimum(highest, piece + segment)
    if begin >= stop:
        return

    row_a = (q0 + query_a) * HEADS
    row_b = row_a + QUERIES * HEADS
    q_tile = gl.allocate_shared_memory(queries.dtype, [2, QUERIES * HEADS, DIM], queries.layout)
    k_tiles = gl.allocate_shared_memory(queries.dtype, [2, POOLS, DIM], keys.layout)
    arrived = mbarrier.allocate_mbarrier(batch=3)
    for i in gl.static_range(3):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(arrived.index(2), 2 * queries.nbytes_per_cta)
    tma.async_load(queries, [row_a, 0], arrived.index(2), q_tile.index(0))
    tma.async_load(queries, [row_b, 0], arrived.index(2), q_tile.index(1))
    for i in gl.static_range(2):
        there = begin + i * POOLS < stop
        mbarrier.expect(arrived.index(i), keys.nbytes_per_cta, pred=there)
        tma.async_load(keys, [begin + i * POOLS, 0], arrived.index(i), k_tiles.index(i), pred=there)
    w_a = _weights_by_thread(weights, row_a, q1 * HEADS, scale, QUERIES, HEADS, BITS)
    w_b = _weights_by_thread(weights, row_b, q1 * HEADS, scale, QUERIES, HEADS, BITS)

    mbarrier.wait(arrived.index(2), 0)
    # Two tiles in a round, with nothing in flight at its end: else products would not overlap with
    # anything, as the compiler sees registers that are read while a product writes others.
    for at in range(begin, stop, 2 * POOLS):
        phase = (at - begin) // (2 * POOLS) & 1
        # Of an odd number of tiles the last product is of old keys, and nothing of it is stored.
        second = at + POOLS < stop
        rows = gl.where(second, q1 - q0, 0)
        mbarrier.wait(arrived.index(0), phase)
        a = _multiply(k_tiles.index(0), q_tile.index(0), BITS)
        b = _multiply(k_tiles.index(0), q_tile.index(1), BITS)
        a = warpgroup_mma_wait(1, deps=[a])
        _finish(
            a, w_a, lowest_a, highest_a, scores, best, query_a, q1 - q0, at, p0, width,
            key_factors, pools, QUERIES, HEADS, POOLS, GROUP,
        )  # fmt: skip
        mbarrier.wait(arrived.index(1), phase, pred=second)
        a = _multiply(k_tiles.index(1), q_tile.index(0), BITS)
        b = warpgroup_mma_wait(1, deps=[b])
        gl.barrier()
        ahead = at + 2 * POOLS < stop
        mbarrier.expect(arrived.index(0), keys.nbytes_per_cta, pred=ahead)
        tma.async_load(keys, [at + 2 * POOLS, 0], arrived.index(0), k_tiles.index(0), pred=ahead)
        _finish(
            b, w_b, lowest_b, highest_b, scores, best, query_b, q1 - q0, at, p0, width,
            key_factors, pools, QUERIES, HEADS, POOLS, GROUP,
        )  # fmt: skip
        b = _multiply(k_tiles.index(1), q_tile.index(1), BITS)
        a = warpgroup_mma_wait(1, deps=[a])
        _finish(
            a, w_a, lowest_a, highest_a, scores, best, query_a, rows, at + POOLS, p0, width,
            key_factors, pools, QUERIES, HEADS, POOLS, GROUP,
        )  # fmt: skip
        b = warpgroup_mma_wait(0, deps=[b])
        gl.barrier()
        ahead = at + 3 * POOLS < stop
        mbarrier.expect(arrived.index(1), keys.nbytes_per_cta, pred=ahead)
        tma.async_load(keys, [at + 3 * POOLS, 0], arrived.index(1), k_tiles.index(1), pred=ahead)
        _finish(
            b, w_b, lowest_b, highest_b, scores, best, query_b, rows, at + POOLS, p0, width,
            key_factors, pools, QUERIES, HEADS, POOLS, GROUP,
        )  # fmt: skip


def _descriptor(rows: torch.Tensor, block: int) -> TensorDescriptor:
    shape = [block, rows.shape[1]]
    layout = gl.NVMMASharedLayout.get_default_for(shape, _DTYPES[rows.dtype])
    # Of a single row the stride may be anything.
    return TensorDescriptor(rows, list(rows.shape), [rows.shape[1], 1], shape, layout)


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
    """See ``triton_scores.write_scores``."""
    heads, dim = queries.shape[1:]
    per_program = COLUMNS // heads
    grid = (
        triton.cdiv(window.q1 - window.q0, per_program),
        triton.cdiv(window.width, _SEGMENT),
    )
    _scores_kernel[grid](
        _descriptor(queries.flatten(0, 1), COLUMNS // 2), weights, _descriptor(keys, TILE),
        first, end, space.scores, space.best, scale,
        window.q0, window.q1, window.p0, window.width, segment=_SEGMENT,
        key_factors=key_factors, pools=len(keys), HEADS=heads, DIM=dim, QUERIES=per_program // 2,
        POOLS=TILE, GROUP=GROUP, BITS=8 * keys.itemsize, num_warps=_WARPS,
    )  # fmt: skip
