"""Which boundaries go to the host when not all of them fit there, or need to.

Boundary ``i`` is what backward needs to recompute unit ``i`` (a layer, or a segment of layers). All
are saved in forward; backward goes from the last to the first. While it works on unit ``i`` the
device holds

    working_sets[i] + sizes[i] + sizes[i - 1] + sum of sizes[j] for j <= i - 2 left on the device

because boundary ``i`` is in use and ``i - 1`` is there already: it was left, or is restored one
unit ahead. (Copies in line restore none ahead: ``i - 1`` then counts as those before it.) While it
computes the loss it holds ``loss_working_set`` and all that were left. The peak is the largest of
these figures. (A unit's forward holds less than its backward.)

Equal sizes: offloading the earliest first is best, whatever the working sets. With ``m`` boundaries
offloaded, the loss sees ``n - m`` left, whichever they are. Unit ``i`` sees ``i - 1`` boundaries
below ``i - 1``, of which at most ``min(m, i - 1)`` can have been offloaded, and the ``m`` earliest
reach that number for every ``i`` at once. So no other choice of ``m`` boundaries holds less at any
moment, and none has a lower peak. A larger ``m`` never raises the peak; how large it must be does
depend on the working sets, and ``choose`` finds the smallest.

Unequal sizes: no choice need be best at every moment. ``choose`` is then exact by dynamic
programming: what comes later depends on earlier choices only through the bytes offloaded so far, so
for each such number the choice with the lowest peak so far is enough.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate


def forward_order(sizes: Sequence[int], budget: int | None) -> frozenset[int]:
    """Take each boundary, first to last, that fits in what is left of the budget.

    Args:
        sizes: bytes of each boundary, in forward order.
        budget: bytes; None for no limit.

    Returns:
        Indices into ``sizes``.
    """
    chosen, left = [], sum(sizes) if budget is None else budget
    for index, size in enumerate(sizes):
        if size <= left:
            chosen.append(index)
            left -= size
    return frozenset(chosen)


def peak(
    sizes: Sequence[int],
    working_sets: Sequence[int],
    loss_working_set: int,
    chosen: Collection[int],
    waiting: int = 0,
    ahead: int = 1,
) -> int:
    """Most bytes that boundaries and working sets hold at one time on the device.

    Args:
        sizes: bytes of each boundary, in forward order.
        working_sets: bytes that each unit's recomputation and backward hold besides; as many.
        loss_working_set: bytes that the loss holds besides.
        chosen: indices of the offloaded boundaries.
        waiting: how many of the last boundaries are still on the device during the loss.
        ahead: how many are restored before their unit begins, 0 or 1.
    """
    left = [0 if index in chosen else size for index, size in enumerate(sizes)]
    held = len(sizes) - min(waiting, len(sizes))
    moments = [loss_working_set + sum(left[:held]) + sum(sizes[held:])]
    for i, work in enumerate(working_sets):
        first = max(i - ahead, 0)
        moments.append(work + sum(sizes[first : i + 1]) + sum(left[:first]))
    return max(moments)


def choose(
    sizes: Sequence[int],
    working_sets: Sequence[int],
    loss_working_set: int,
    budget: int | None,
    waiting: int = 0,
    ahead: int = 1,
) -> frozenset[int]:
    """Find the boundaries whose offload gives the lowest peak, and of those the fewest bytes.

    A boundary whose offload does not lower the peak stays on the device. Among equals the earliest
    are taken.

    Args:
        sizes, working_sets, loss_working_set, waiting, ahead: as in ``peak``.
        budget: bytes that may be offloaded; None for no limit.

    Returns:
        Indices into ``sizes``.

    Raises:
        ValueError: there is not one working set for each boundary.
    """
    if len(working_sets) != len(sizes):
        raise ValueError(f"{len(sizes)} boundaries, but {len(working_sets)} working sets")
    seen_after, start = _moments(sizes, working_sets, loss_working_set, waiting, ahead)
    limit = sum(sizes) if budget is None else budget
    # Bytes offloaded so far -> lowest peak so far and the indices that reach it.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (start, ())}
    for index, size in enumerate(sizes):
        grown: dict[int, tuple[int, tuple[int, ...]]] = {}
        for used, (highest, picked) in best.items():
            for extra, picks in ((0, picked), (size, (*picked, index))):
                total = used + extra
                state = (max(highest, seen_after[index] - total), picks)
                if total <= limit and (total not in grown or state < grown[total]):
                    grown[total] = state
        best = grown
    _, _, picks = min((highest, used, picks) for used, (highest, picks) in best.items())
    return frozenset(picks)


def _moments(
    sizes: Sequence[int],
    working_sets: Sequence[int],
    loss_working_set: int,
    waiting: int,
    ahead: int,
) -> tuple[list[int], int]:
    """What the device holds with nothing offloaded, at the moments that see choices 0..index and no
    later ones (0 where there is no such moment), and at those that see no choice at all."""
    totals = list(accumulate(sizes, initial=0))
    seen_after = [0] * len(sizes)
    start = 0
    last_seen = len(sizes) - 1 - waiting
    moments = [(last_seen, loss_working_set + totals[-1])]
    moments += [(i - 1 - ahead, work + totals[i + 1]) for i, work in enumerate(working_sets)]
    for index, held in moments:
        if index < 0:
            start = max(start, held)
        else:
            seen_after[index] = max(seen_after[index], held)
    return seen_after, start
