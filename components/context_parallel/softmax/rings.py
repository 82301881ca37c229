"""Rings of ranks: one of all, or inner ones whose members also stand in outer ones.

Of C ranks in inner rings of w, rank r is number r mod w of inner ring r // w, and stands in the
outer ring of all ranks of its number. Rows go round the inner rings while those of the next inner
ring are already on their way through the outer ones, so links within a node and between nodes
work at the same time: the double ring of LoongTrain (arXiv 2406.18485). The outer rings have a
group of their own; in one group messages would wait for each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from components.context_parallel.collectives import Direction, Link
from components.context_parallel.layout import DEGREE
from components.vocabulary.ring import Hop, Ring, travelling


class CountedRing(Ring):
    """A ring whose bytes are counted."""

    def __init__(
        self, group: dist.ProcessGroup | None, link: Link, name: str, direction: Direction
    ) -> None:
        super().__init__(group)
        self._count = lambda count: link.traffic.add(name, direction, count)

    def start(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> Hop:
        """See ``Ring.start``."""
        if outgoing.numel():
            self._count(outgoing.nbytes)
        return super().start(outgoing, incoming)


@dataclass(frozen=True, eq=False)
class Rings:
    """The inner and the outer ring of a rank. A group that is None is a ring of one rank.

    Attributes:
        link: to all ranks.
        width: ranks of an inner ring.
    """

    link: Link
    width: int
    inner_group: dist.ProcessGroup | None
    outer_group: dist.ProcessGroup | None

    @staticmethod
    def of(link: Link, width: int) -> "Rings":
        """Inner rings of ``width`` ranks, neighbours in the group.

        Groups are made where neither ring is that of all ranks: the first time, all ranks of the
        group must come here, and for all groups in the same order.

        Raises:
            ValueError: ``width`` does not divide the ranks; with the widths that do.
        """
        check_width(width, link.size)
        return Rings(link, width, *_groups(link.group, width))

    @property
    def outer_size(self) -> int:
        """Inner rings, which is the ranks of an outer ring."""
        return self.link.size // self.width

    def inner(self, what: str, direction: Direction) -> CountedRing:
        """The inner ring; bytes are counted as ``what``."""
        return CountedRing(self.inner_group, self.link, f"softmax.{what}", direction)

    def outer(self, what: str, direction: Direction) -> CountedRing:
        """The outer ring; bytes are counted as ``what`` between inner rings."""
        return CountedRing(self.outer_group, self.link, f"softmax.outer_{what}", direction)

    @property
    def own(self) -> int:
        """The inner ring of this rank."""
        return self.link.rank // self.width

    def members(self, ring: int) -> range:
        """Ranks of an inner ring."""
        return range(ring * self.width, (ring + 1) * self.width)

    def peers(self) -> range:
        """Ranks of this rank's outer ring."""
        return range(self.link.rank % self.width, self.link.size, self.width)


def check_width(width: int, ranks: int) -> None:
    """Raise ValueError unless ``ranks`` divide into inner rings of ``width``."""
    legal = [n for n in range(1, ranks + 1) if ranks % n == 0]
    if width not in legal:
        raise ValueError(
            f"inner_ring: {width} ranks beside {DEGREE} {ranks}; legal: "
            f"{', '.join(map(str, legal))}"
        )


@lru_cache(maxsize=16)
def _groups(
    group: dist.ProcessGroup, width: int
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    first = rank // width * width
    inner = _group(group, range(first, first + width))
    return inner, _group(group, range(rank % width, ranks, width))


def _group(group: dist.ProcessGroup, ranks: range) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if len(ranks) == dist.get_world_size(group):
        return group
    everywhere = [dist.get_global_rank(group, rank) for rank in ranks]
    # Ranks of other groups make theirs, or none, in their own time.
    made = dist.new_group(everywhere, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
    return made


def go_round(
    rings: Rings, mine: torch.Tensor, rows: list[int], direction: Direction
) -> Iterator[tuple[int, Iterator[tuple[int, torch.Tensor]]]]:
    """Every rank's rows, those of one inner ring after the other.

    What comes next is on its way while the caller works; in both rings.

    Args:
        mine: (rows[rank], ...), contiguous; must not change meanwhile.
        rows: of each rank.

    Yields:
        The inner ring, and its ranks' rows in turn: (rank, rows). This rank's own come first.
    """
    outer = rings.outer("ring", direction)
    # Members of the outer ring are numbered as the inner rings are.
    for ring, first in travelling(outer, mine, [rows[r] for r in rings.peers()]):
        yield ring, _inner_round(rings, ring, first, rows, direction)


def _inner_round(
    rings: Rings, ring: int, first: torch.Tensor, rows: list[int], direction: Direction
) -> Iterator[tuple[int, torch.Tensor]]:
    inner, members = rings.inner("ring", direction), rings.members(ring)
    for number, held in travelling(inner, first, [rows[r] for r in members]):
        yield members[number], held
