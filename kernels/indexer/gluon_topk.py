"""Exact selection of the highest scores in Gluon: a program a row, few instructions a score.

As ``triton_topk``, with three differences. A thread holds consecutive columns, so that a running
count is additions in registers. The bound is searched between the least and the highest score, at
first half-way between the numbers. And of the best groups only those members are looked at that
reach the least of these groups' best scores: at least ``count`` columns do, one in each of the
groups. They are few unless neighbours are alike; a row with more of them than shared memory holds
is left to ``triton_topk``.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.indexer import triton_topk
from kernels.indexer.windows import GROUP, TILE, Window, Workspace, most_groups

MOST_CHOSEN = 512
"""Most pools that are chosen here; more are left to ``triton_topk``."""
_MOST_GROUPS = 16384  # more do not fit into the registers of a program
_TILE = gl.constexpr(TILE)
_GATHERED = gl.constexpr(2048)
"""Members that shared memory holds."""
_DONE = gl.constexpr(triton_topk.DONE)
_PER_WARP = 512
"""Scores of a warp, 16 a thread; more where a program would need more than 16 warps for groups."""
_REGISTERS = 64
"""Of a thread that holds 16 scores: so many that eight programs share a multiprocessor."""


@gluon.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit
def _key(score):  # type: ignore[no-untyped-def]
    """uint32 in the order of float32: -0.0 equals 0.0, nan is above everything; never 0."""
    bits = gl.where(score == 0.0, 0.0, score).to(gl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) | -0x80000000)
    return gl.where(score != score, -2, key).to(gl.uint32, bitcast=True)


@gluon.jit
def _score_of(key):  # type: ignore[no-untyped-def]
    bits = key.to(gl.int32, bitcast=True)
    bits = gl.where(bits < 0, bits ^ -0x80000000, ~bits)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _bound(key, count, low, reached, high):  # type: ignore[no-untyped-def]
    """Narrow the bound: ``reached`` keys reach ``low``, fewer than ``count`` reach ``high``.

    Ends with exactly ``count`` at or above ``low``, or with ``high`` the next key above ``low``;
    ``above`` keys are then at or above ``high``.
    """
    above = gl.to_tensor(0)
    step = gl.to_tensor(0)
    while (reached > count) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        # Scores are spread rather evenly, keys are not; but halving keys ends within 32 steps.
        guess = _key(0.5 * _score_of(low) + 0.5 * _score_of(high))
        middle = gl.where((step < 16) & (guess > low) & (guess < high), guess, middle)
        met = gl.sum((key >= middle).to(gl.int32), 0)
        enough = met >= count
        low = gl.where(enough, middle, low)
        reached = gl.where(enough, met, reached)
        high = gl.where(enough, high, middle)
        above = gl.where(enough, above, met)
        step += 1
    return low, reached, high, above


@gluon.jit
def _choose(key, count, reached):  # type: ignore[no-untyped-def]
    """Which of the ``reached`` keys above 0 are the ``count`` highest (ties to the first), and the
    bound they reach."""
    low = gl.min(gl.where(key > 0, key, 0xFFFFFFFF), 0)
    high = gl.max(key, 0) + 1
    low, reached, high, above = _bound(key, count, low, reached, high)
    chosen = key >= low
    if reached > count:
        tied = (key == low).to(gl.int32)
        first = gl.associative_scan(tied, 0, _add) <= count - above
        chosen = (key >= high) | ((key == low) & first)
    return chosen, low


@gluon.jit
def _write(chosen, column, out, count, ROOM: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    place = gl.associative_scan(chosen.to(gl.int32), 0, _add)
    gl.store(out + place - 1, column, mask=chosen)
    total = gl.sum(chosen.to(gl.int32), 0)
    if total < count:
        rest = gl.arange(0, ROOM, layout)
        gl.store(
            out + rest, gl.full([ROOM], -1, gl.int32, layout), mask=(rest >= total) & (rest < count)
        )


@gluon.jit(do_not_specialize=["q0", "p0", "width", "count"])
def _whole_kernel(  # type: ignore[no-untyped-def]
    values, first, end, out, q0, p0, width, count, SLOTS: gl.constexpr, ROOM: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([SLOTS // (32 * WARPS)], [32], [WARPS], [0])
    few: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row = gl.program_id(0).to(gl.int64)
    lowest = gl.load(first + q0 + row)
    highest = gl.load(end + q0 + row)
    # They are whole tiles. Where that is said, rows are read 16 bytes at a time, four columns.
    width = width // _TILE * _TILE
    p0 = p0 // _TILE * _TILE
    column = (lowest // 4) * 4 + gl.arange(0, SLOTS, layout)
    line = values + row * width
    score = gl.load(line + (column - p0), mask=column < p0 + width, other=0.0)
    real = (column >= lowest) & (column < highest)
    key = gl.where(real, _key(score), 0)
    chosen, _ = _choose(key, count, gl.maximum(highest - lowest, 0))
    begin = out + row * count
    _write(chosen, column - lowest, begin, count, ROOM, few)


@gluon.jit
def _among(  # type: ignore[no-untyped-def]
    scores, columns, found, out, count,
    CAP: gl.constexpr, ROOM: gl.constexpr, kept: gl.constexpr, few: gl.constexpr,
):  # fmt: skip
    """Choose from the ``found`` first of the gathered members."""
    real = gl.arange(0, CAP, kept) < found
    key = gl.where(real, _key(scores.slice(0, CAP).load(kept)), 0)
    chosen, _ = _choose(key, count, found)
    _write(chosen, columns.slice(0, CAP).load(kept), out, count, ROOM, few)


@gluon.jit
def _leave(listed, total, groups, count, ROOM: gl.constexpr, few: gl.constexpr):  # type: ignore[no-untyped-def]
    nth = gl.arange(0, ROOM, few)
    group = gl.where(nth < total, listed.slice(0, ROOM).load(few), -1)
    gl.store(groups + nth, group, mask=nth < count)


@gluon.jit(do_not_specialize=["q0", "p0", "width", "count"])
def _filtered_kernel(  # type: ignore[no-untyped-def]
    values, bests, groups, first, end, out, q0, p0, width, count,
    SLOTS: gl.constexpr, GROUP: gl.constexpr, ROOM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    THREADS: gl.constexpr = 32 * WARPS
    CAP: gl.constexpr = _GATHERED
    FIT: gl.constexpr = CAP - THREADS  # the others take what is not kept
    ranked: gl.constexpr = gl.BlockedLayout([SLOTS // THREADS], [32], [WARPS], [0])
    kept: gl.constexpr = gl.BlockedLayout([CAP // THREADS], [32], [WARPS], [0])
    few: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    tiles: gl.constexpr = gl.BlockedLayout([1, GROUP], [32, 1], [WARPS, 1], [1, 0])
    by_group: gl.constexpr = gl.SliceLayout(1, tiles)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    listed = gl.allocate_shared_memory(gl.int32, [2 * ROOM], plain)
    scores = gl.allocate_shared_memory(gl.float32, [CAP], plain)
    columns = gl.allocate_shared_memory(gl.int32, [CAP], plain)

    row = gl.program_id(0).to(gl.int64)
    lowest = gl.load(first + q0 + row)
    highest = gl.load(end + q0 + row)
    # As above.
    width = width // _TILE * _TILE
    p0 = p0 // _TILE * _TILE

    slot = gl.arange(0, SLOTS, ranked)
    group = lowest // GROUP // 4 * 4 + slot
    real = (group >= lowest // GROUP) & (group * GROUP < highest)
    groups_wide = width // GROUP
    nth_group = group - p0 // GROUP
    to_best = bests + row * groups_wide
    key = gl.load(to_best + nth_group, mask=nth_group < groups_wide, other=0.0)
    key = gl.where(real, _key(key), 0)
    chosen, least = _choose(key, count, gl.sum(real.to(gl.int32), 0))
    place = gl.associative_scan(chosen.to(gl.int32), 0, _add) - 1
    total = gl.sum(chosen.to(gl.int32), 0)
    # What is not chosen goes to a place of its own for each thread, never read.
    trash = slot // (SLOTS // THREADS)
    listed.scatter(group, gl.where(chosen, place, ROOM + trash), 0)
    gl.barrier()

    # Fewer groups than wanted: no score is known to be too low.
    least = gl.where(total < count, float("-inf"), _score_of(least))
    span = gl.maximum(highest - lowest, 0).to(gl.uint32)
    found = gl.to_tensor(0)
    member = gl.arange(0, GROUP, gl.SliceLayout(0, tiles))
    thread = gl.arange(0, THREADS, by_group)
    line = values + row * width
    for start in range(0, total, THREADS):
        nth = start + thread
        there = nth < total
        base = listed.gather(gl.minimum(nth, ROOM - 1), 0) * GROUP
        base = gl.where(there, base, p0)
        column = gl.expand_dims(base, 1) + gl.expand_dims(member, 0)
        place_in_row = gl.max_contiguous(gl.multiple_of(column - p0, [1, GROUP]), [1, GROUP])
        score = gl.load(line + place_in_row)
        column = column - lowest
        # Not below, so that nan is kept.
        keep = (column.to(gl.uint32) < span) & ~(score < least) & gl.expand_dims(there, 1)
        one = keep.to(gl.int32)
        within = gl.associative_scan(one, 1, _add)
        number = gl.convert_layout(gl.sum(one, 1), few)
        before = gl.convert_layout(gl.associative_scan(number, 0, _add) - number, by_group)
        spot = found + gl.expand_dims(before, 1) + within - 1
        spill = gl.expand_dims(FIT + thread, 1) + gl.zeros([THREADS, GROUP], gl.int32, tiles)
        spot = gl.where(keep & (spot < FIT), spot, spill)
        flat: gl.constexpr = [THREADS * GROUP]
        scores.scatter(gl.reshape(score, flat), gl.reshape(spot, flat), 0)
        columns.scatter(gl.reshape(column, flat), gl.reshape(spot, flat), 0)
        found += gl.sum(number, 0)
    gl.barrier()

    begin = out + row * count
    noted = groups + row * count
    if found <= FIT:
        HALF: gl.constexpr = CAP // 2
        halves: gl.constexpr = gl.BlockedLayout([HALF // THREADS], [32], [WARPS], [0])
        if found <= HALF:
            _among(scores, columns, found, begin, count, HALF, ROOM, halves, few)
        else:
            _among(scores, columns, found, begin, count, CAP, ROOM, kept, few)
        gl.store(noted, _DONE)
    else:
        _leave(listed, total, noted, count, ROOM, few)


def choose(
    space: Workspace,
    first: torch.Tensor,
    end: torch.Tensor,
    window: Window,
    out: torch.Tensor,
) -> None:
    """See ``triton_topk.choose``, which takes what does not fit here."""
    count, rows = out.shape[1], window.q1 - window.q0
    # Reading begins up to three groups, or columns, early.
    slots = triton.next_power_of_2(most_groups(window.widest) + 3)
    if count > MOST_CHOSEN or slots > _MOST_GROUPS:
        triton_topk.choose(space, first, end, window, out)
    elif triton_topk.ranks_groups(window.widest, count):
        slots = max(_PER_WARP, slots)
        warps = max(4, min(16, slots // _PER_WARP))
        _filtered_kernel[(rows,)](
            space.scores, space.best, space.groups, first, end, out,
            window.q0, window.p0, window.width, count,
            SLOTS=slots, GROUP=GROUP, ROOM=MOST_CHOSEN, WARPS=warps,
            num_warps=warps, maxnreg=_REGISTERS * max(1, slots // (warps * _PER_WARP)),
        )  # fmt: skip
        triton_topk.choose_members(space, first, end, window, out)
    else:
        slots = max(_PER_WARP, triton.next_power_of_2(window.widest + 3))
        _whole_kernel[(rows,)](
            space.scores, first, end, out, window.q0, window.p0, window.width, count,
            SLOTS=slots, ROOM=MOST_CHOSEN, WARPS=slots // _PER_WARP,
            num_warps=slots // _PER_WARP, maxnreg=_REGISTERS,
        )  # fmt: skip
