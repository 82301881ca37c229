"""What a layer's attention sends, before a run: the formulas that counted bytes are held against.

All are bytes that one rank sends to the others in one pass. With n tokens on each of C ranks, N
query heads, M key heads, keys and values of H, e bytes per element and float32 gradients of 4:

- "ulysses": n (2 N + 2 f M) H e (C - 1) / C in either direction, of f copies of key heads.
- "all_gather": n 2 M H e (C - 1), and back n 2 M H (e + 4) (C - 1).
- "ring", "double_ring": the same; the last part of a batch leaves no rank.
- "window": (w - 1) 2 M H e for each document that goes on in another rank's part; and back the
  same, and for each that comes from one (w - 1) 2 M H 4. In windows longer than a part, more.

Only tokens of documents that go on in a later part count for the latter three.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from components.context_parallel.layout import Layout
from components.context_parallel.softmax.attend import Exchange
from components.context_parallel.softmax.heads import HeadSplit
from components.context_parallel.softmax.reach import Reach
from components.context_parallel.volume import FULL, Volume


@dataclass(frozen=True)
class Heads:
    """Of a layer: how many, and how wide."""

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int

    @property
    def keys_values(self) -> int:
        """Numbers in the keys and values of a token."""
        return self.key_heads * (self.head_dim + self.value_dim)


def softmax_volume(
    exchange: Exchange,
    layout: Layout,
    rank: int,
    heads: Heads,
    element_size: int,
    window: int | None = None,
    need_lse: bool = False,
) -> Volume:
    """Of a layer's attention on ``rank``.

    Args:
        element_size: bytes of an activation.
        window: of the layer.
        need_lse: whether the log-sum-exp is wanted, as by attention sinks.

    Raises:
        ValueError: the ranks cannot split the heads, or themselves.
    """
    exchange.check(heads.heads, heads.key_heads, layout.ranks)
    reach, row = Reach(layout, window), heads.keys_values * element_size
    full_row = heads.keys_values * FULL
    if exchange.method == "ulysses":
        return _ulysses(layout, rank, heads, element_size, need_lse)
    if exchange.method == "window":
        sent, received = _seen_by_others(reach, rank), _seen_of_others(reach, rank)
        return Volume(sent * row, sent * row + received * full_row)
    if exchange.method == "all_gather":
        rows = reach.order.most * (layout.ranks - 1)
        return Volume(rows * row, rows * (row + full_row))
    leaving = [reach.leaving_of(r) for r in range(layout.ranks)]
    keys, sums = _round(leaving, rank, exchange.inner_ring or layout.ranks)
    return Volume(keys * row, keys * row + sums * full_row)


def _ulysses(layout: Layout, rank: int, heads: Heads, element_size: int, need_lse: bool) -> Volume:
    split = HeadSplit(heads.heads, heads.key_heads, layout.ranks)
    own = layout.tokens_of(rank)
    others = layout.tokens - own
    inputs = split.own * heads.head_dim + split.own_keys * (heads.head_dim + heads.value_dim)
    outputs = split.own * (heads.value_dim * element_size + (FULL if need_lse else 0))
    away = own * (layout.ranks - 1)
    return Volume(
        away * inputs * element_size + others * outputs,
        others * inputs * element_size + away * outputs,
    )


def _seen_by_others(reach: Reach, rank: int) -> int:
    """Rows of a rank that parts of other ranks see, each counted as often as it is seen."""
    owners = reach.layout.owners
    return sum(
        reach.seen(part, before)
        for before in reach.layout.held(rank)
        for part, owner in enumerate(owners)
        if owner != rank
    )


def _seen_of_others(reach: Reach, rank: int) -> int:
    """Rows of other ranks that a rank's parts see."""
    owners = reach.layout.owners
    return sum(
        reach.seen(part, before)
        for part in reach.layout.held(rank)
        for before, owner in enumerate(owners)
        if owner != rank
    )


def _round(leaving: Sequence[int], rank: int, width: int) -> tuple[int, int]:
    """Rows of keys and values that a rank passes on, and rows of their gradients.

    Args:
        leaving: rows of each rank.
        width: ranks of an inner ring.
    """
    rings, own_ring, number = len(leaving) // width, rank // width, rank % width
    keys = sums = 0
    for turn in range(rings):
        first = (own_ring - turn) % rings * width
        members = leaving[first : first + width]
        # All go on but those that come last, of the next in the ring.
        keys += sum(members) - members[(number + 1) % width]
        if width > 1:
            # Sums of the rank's own rows begin with the next rank.
            sums += sum(members) - (members[number] if turn == 0 else 0)
        # To the next inner ring, keys until the last turn, and what has come for their gradients
        # from the second turn on.
        keys += members[number] if turn < rings - 1 else 0
        sums += members[number] if turn > 0 else 0
    return keys, sums
