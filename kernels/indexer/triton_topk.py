"""Exact selection of the highest scores in Triton: one program a row, scores in registers.

The least score that is still chosen is found bit by bit: each step counts the scores at or above a
candidate, and the search ends early once exactly as many are left as are wanted. There are no
atomics and no histogram, and nothing depends on the order in which threads run.

Rows too long for registers take two steps. Ranked by their best member (ties to the lowest group),
the ``count`` best groups hold the ``count`` best columns, for whatever is in another group has at
least ``count`` columns before it. So the first step ranks groups, and the second only looks into
those chosen.
"""

import torch
import triton
import triton.language as tl

from kernels.indexer.windows import GROUP, Window, Workspace, most_groups

_WHOLE, _GROUPS, _MEMBERS = 0, 1, 2
_PER_WARP = 1024
_LEAST_SLOTS = 128  # below, nothing is gained and each power of two is compiled
_NOTHING = tl.constexpr(-0x7FFFFFFF - 1)
DONE = -2
"""First of a row's ``groups`` where its choice is written already."""
_DONE = tl.constexpr(DONE)


@triton.jit
def _order_key(score):  # type: ignore[no-untyped-def]
    """int32 in the order of float32: -0.0 equals 0.0, nan is above everything.

    The lowest int32 is the key of no score.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit
def _least_chosen(key, count):  # type: ignore[no-untyped-def]
    """The highest bound, or a good enough one, that at least ``count`` keys reach; how many do."""
    bound = tl.full((), _NOTHING, tl.int32)
    reached = tl.full((), 0x7FFFFFFF, tl.int32)
    bit = tl.full((), 31, tl.int32)
    while (bit >= 0) & (reached != count):
        # The bits below are still clear, so this sets one; the first step goes from least to zero.
        candidate = bound ^ (tl.full((), 1, tl.int32) << bit)
        met = tl.sum((key >= candidate).to(tl.int32), 0)
        bound = tl.where(met >= count, candidate, bound)
        reached = tl.where(met >= count, met, reached)
        bit -= 1
    return bound, reached


@triton.jit(do_not_specialize=["q0", "p0", "width", "count"])
def _select_kernel(  # type: ignore[no-untyped-def]
    values, groups, first, end, out, q0, p0, width, count,
    STAGE: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    # STAGE: 0 takes all columns of a row, 1 the best of each group and chooses groups, numbered
    # through the batch, 2 the columns in the groups that 1 chose.
    row = tl.program_id(0).to(tl.int64)
    lowest = tl.load(first + q0 + row)
    highest = tl.load(end + q0 + row)
    slot = tl.arange(0, SLOTS)
    if STAGE == 2:
        if tl.load(groups + row * count) == _DONE:
            return
        # One element a thread at a time: wider reads would make the store change layouts.
        nth = slot // GROUP
        group = tl.load(groups + row * count + nth, mask=nth < count, other=-1)
        column = group * GROUP + (slot & (GROUP - 1))  # of group -1 below zero
        real = (column >= lowest) & (column < highest)
        score = tl.load(values + row * width + (column - p0), mask=real, other=0.0)
        origin = lowest
    elif STAGE == 1:
        column = lowest // GROUP + slot
        real = column * GROUP < highest
        at = values + row * (width // GROUP) + (column - p0 // GROUP)
        score = tl.load(at, mask=real, other=0.0)
        origin = 0
    else:
        column = lowest + slot
        real = column < highest
        score = tl.load(values + row * width + (column - p0), mask=real, other=0.0)
        origin = lowest

    chosen = real
    if tl.sum(real.to(tl.int32), 0) > count:
        key = tl.where(real, _order_key(score), _NOTHING)
        bound, reached = _least_chosen(key, count)
        chosen = key >= bound
        if reached > count:
            above = key > bound
            missing = count - tl.sum(above.to(tl.int32), 0)
            tied = key == bound
            chosen = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= missing))
    begin = out + row * count
    place = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(begin + place - 1, column - origin, mask=chosen)
    rest = tl.arange(0, ROOM)
    total = tl.sum(chosen.to(tl.int32), 0)
    tl.store(begin + rest, tl.full((ROOM,), -1, tl.int32), mask=(rest >= total) & (rest < count))


def _launch(
    stage: int, slots: int, values: torch.Tensor, out: torch.Tensor, space: Workspace,
    first: torch.Tensor, end: torch.Tensor, window: Window,
) -> None:  # fmt: skip
    count, slots = out.shape[1], max(_LEAST_SLOTS, slots)
    _select_kernel[(window.q1 - window.q0,)](
        values, space.groups, first, end, out, window.q0, window.p0, window.width, count,
        STAGE=stage, SLOTS=slots, GROUP=GROUP, ROOM=triton.next_power_of_2(count),
        num_warps=min(32, max(1, slots // _PER_WARP)),
    )  # fmt: skip


def ranks_groups(widest: int, count: int) -> bool:
    """Whether rows so long are less work in two steps: the groups chosen hold fewer columns."""
    return triton.next_power_of_2(widest) > triton.next_power_of_2(count) * GROUP


def choose_members(
    space: Workspace, first: torch.Tensor, end: torch.Tensor, window: Window, out: torch.Tensor
) -> None:
    """``choose`` among the groups in ``space.groups``; rows that are ``DONE`` stay as they are."""
    members = triton.next_power_of_2(out.shape[1]) * GROUP
    _launch(_MEMBERS, members, space.scores, out, space, first, end, window)


def choose(
    space: Workspace,
    first: torch.Tensor,
    end: torch.Tensor,
    window: Window,
    out: torch.Tensor,
    *,
    in_steps: bool | None = None,
) -> None:
    """Write the best columns of each row of a window, ascending, counted from ``first``, then -1.

    Of equal scores the lowest column is chosen; -0.0 equals 0.0, nan is above everything.

    Args:
        space: ``scores`` and ``best`` of the window, filled where a query may choose.
        first, end: int32 (Q,), which pools each query may choose; ``end`` may be below ``first``.
        window: whose queries and pools these are.
        out: int32 (rows, count), contiguous.
        in_steps: whether groups are ranked first, by default where that is less work.
    """
    widest = window.widest
    if ranks_groups(widest, out.shape[1]) if in_steps is None else in_steps:
        groups = triton.next_power_of_2(most_groups(widest))
        _launch(_GROUPS, groups, space.best, space.groups, space, first, end, window)
        choose_members(space, first, end, window, out)
    else:
        whole = triton.next_power_of_2(widest)
        _launch(_WHOLE, whole, space.scores, out, space, first, end, window)
