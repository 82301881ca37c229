"""How a batch of packed documents is cut over ranks: the one object that every part asks."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, get_args

import torch

from components.context_parallel.order import Order
from components.models.glm_flash.chunked.pieces import Piece
from kernels.packed import bounds, check_lengths

Kind = Literal["contiguous", "zigzag"]

KINDS = get_args(Kind)

DEGREE = "parallelism.context_parallel_degree"


@dataclass(frozen=True)
class Layout:
    """The tokens of a batch, cut into consecutive parts, each of which one rank holds.

    Made by ``cut_batch``. A part is cut off where a document begins or ends, or a multiple of
    ``align`` tokens from the start of one. So a pool of ``align`` tokens, which counts from its
    document's start, never lies in two parts; nothing is padded, and ranks differ by a few tokens.

    Attributes:
        lengths: tokens of each document, one after the other.
        ranks: C.
        kind: "contiguous": C parts, part r on rank r. "zigzag": 2C parts, r and 2C - 1 - r on rank
            r, so that early tokens, which see little, balance late ones.
        align: tokens.
        parts: first to last; each has its documents' pieces, how far into the first document it
            begins (``ahead``), and whether the last one goes on in the next part (``carries``).
    """

    lengths: tuple[int, ...]
    ranks: int
    kind: Kind
    align: int
    parts: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return self.parts[-1].stop

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank of every part."""
        count = len(self.parts)
        return tuple(min(p, count - 1 - p) if self.kind == "zigzag" else p for p in range(count))

    def held(self, rank: int) -> tuple[int, ...]:
        """Numbers of the parts that a rank holds, ascending: the order of its tokens."""
        return tuple(p for p, owner in enumerate(self.owners) if owner == rank)

    def tokens_of(self, rank: int) -> int:
        """Tokens that a rank holds."""
        return sum(len(self.parts[p]) for p in self.held(rank))

    def fragments(self, rank: int) -> tuple[int, ...]:
        """Tokens of each piece of a document that a rank holds, in the order of its tokens."""
        return tuple(length for p in self.held(rank) for length in self.parts[p].lengths)

    def rows(self, rank: int) -> tuple[slice, ...]:
        """Where each of a rank's parts is among its tokens."""
        ends = bounds(tuple(len(self.parts[p]) for p in self.held(rank)))
        return tuple(slice(begin, end) for begin, end in pairwise(ends))

    def positions(self, rank: int) -> torch.Tensor:
        """int64 (tokens of ``rank``,): distance from the first token of the document."""
        starts = torch.tensor(bounds(self.lengths))[self.document_numbers(rank)]
        return self.order.index(rank, starts.device) - starts

    def document_numbers(self, rank: int) -> torch.Tensor:
        """int64 (tokens of ``rank``,): which of the batch's documents a token belongs to."""
        ends = torch.tensor(bounds(self.lengths)[1:])
        return torch.searchsorted(ends, self.order.index(rank, ends.device), right=True)

    @cached_property
    def order(self) -> Order:
        """Of tokens: between ranks' rows and the batch."""
        return self.order_of([len(part) for part in self.parts])

    def order_of(self, counts: Sequence[int]) -> Order:
        """Of any rows, ``counts`` of which belong to each part; ranks hold them as their tokens."""
        return Order.of(tuple(counts), self.owners)

    @property
    def crosses(self) -> bool:
        """Whether any document is in more than one part."""
        return any(part.carries for part in self.parts)

    def pairs(self, rank: int) -> int:
        """Pairs of a rank's tokens and the tokens of their documents up to themselves."""
        total = 0
        for part in (self.parts[p] for p in self.held(rank)):
            ahead = part.ahead
            for length in part.lengths:
                total += length * ahead + length * (length + 1) // 2
                ahead = 0
        return total

    @property
    def imbalance(self) -> float:
        """Causal work of the busiest rank over the mean: 1 is balanced, C is one rank alone."""
        work = [self.pairs(rank) for rank in range(self.ranks)]
        return max(work) * self.ranks / sum(work)


@lru_cache(maxsize=16)
def cut_batch(
    lengths: tuple[int, ...], ranks: int, kind: Kind = "zigzag", align: int = 4
) -> Layout:
    """Cut documents of these lengths over ``ranks``.

    Cuts are aimed at equal parts and moved to the nearest legal place, the earlier of two: by
    ``align`` / 2 tokens at most.

    Args:
        lengths: tokens of each document of the batch; rows of a batch follow each other.
        ranks: C.
        kind: see ``Layout``.
        align: tokens; a multiple of what a pool holds.

    Raises:
        ValueError: no such kind or alignment, or fewer than 2 x ``align`` tokens for each part:
            then parts could be empty, or shorter than a convolution reaches back.
    """
    check_lengths(lengths, sum(lengths))
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r}; legal: {', '.join(KINDS)}")
    if align < 1:
        raise ValueError(f"align: {align}; legal: 1 token or more")
    total, each = sum(lengths), 2 if kind == "zigzag" else 1
    most = max(1, total // (2 * align * each))
    if not 1 <= ranks <= most:
        raise ValueError(
            f"{DEGREE}: {ranks} ranks cannot share {total} tokens in {kind} parts of at least "
            f"{2 * align}; legal: 1 to {most}"
        )
    # One rank needs no cut.
    count = 1 if ranks == 1 else ranks * each
    begins = bounds(lengths)
    cuts = [_legal(part * total // count, begins, align) for part in range(1, count)]
    parts = tuple(_part(begin, stop, begins) for begin, stop in pairwise([0, *cuts, total]))
    return Layout(lengths, ranks, kind, align, parts)


def _document(token: int, begins: list[int]) -> int:
    return bisect_right(begins, token) - 1


def _legal(wanted: int, begins: list[int], align: int) -> int:
    """The legal place for a cut that is nearest to ``wanted``."""
    document = _document(wanted, begins)
    begin, end = begins[document], begins[document + 1]
    before = wanted - (wanted - begin) % align
    after = min(before + align, end)
    return before if wanted - before <= after - wanted else after


def _part(begin: int, stop: int, begins: list[int]) -> Piece:
    first, last = _document(begin, begins), _document(stop - 1, begins)
    ends = [begin, *begins[first + 1 : last + 1], stop]
    return Piece(
        begin=begin,
        stop=stop,
        lengths=tuple(end - start for start, end in pairwise(ends)),
        ahead=begin - begins[first],
        carries=stop < begins[last + 1],
    )
