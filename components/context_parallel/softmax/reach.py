"""Which tokens of a part others see: only the end of a document that goes on in the next part."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from components.context_parallel.layout import Layout
from components.context_parallel.order import Order
from components.context_parallel.share import Share
from components.context_parallel.softmax.kernel import Block
from kernels.packed import bounds


@dataclass(frozen=True)
class Reach:
    """Of a layout, for layers in which a token sees ``window`` tokens, itself the last of them.

    None stands for a window as long as any document.
    """

    layout: Layout
    window: int | None

    def leaving(self, part: int) -> int:
        """How many of a part's last tokens any later part sees."""
        piece = self.layout.parts[part]
        return self._at_most(piece.lengths[-1], 0) if piece.carries else 0

    def seen(self, part: int, before: int) -> int:
        """How many of the last tokens of part ``before`` the part ``part`` sees."""
        if not self._same_document(part, before):
            return 0
        return self._at_most(self.layout.parts[before].lengths[-1], self._gap(part, before))

    def looking(self, part: int, before: int) -> int:
        """How many of the first tokens of ``part`` see any of ``before``."""
        if not self._same_document(part, before):
            return 0
        return self._at_most(self.layout.parts[part].lengths[0], self._gap(part, before))

    def ahead(self, part: int) -> int:
        """Tokens before a part that it sees."""
        return self._at_most(self.layout.parts[part].ahead, 0)

    def leaving_rows(self, rank: int) -> tuple[slice, ...]:
        """Where the tokens that leave are among those of a rank, part by part."""
        held, rows = self.layout.held(rank), self.layout.rows(rank)
        return tuple(
            slice(where.stop - self.leaving(p), where.stop)
            for p, where in zip(held, rows, strict=True)
        )

    def leaving_of(self, rank: int) -> int:
        """Tokens of a rank that leave."""
        return sum(self.leaving(p) for p in self.layout.held(rank))

    @property
    def order(self) -> Order:
        """Of all tokens that leave, in the order of the batch."""
        return self.layout.order_of([self.leaving(p) for p in range(len(self.layout.parts))])

    @property
    def begins(self) -> list[int]:
        """Where each part's tokens begin among all that leave, and where the last one's end."""
        return bounds(self.order.counts)

    def _same_document(self, part: int, before: int) -> bool:
        """Whether the first document of ``part`` is the last one of ``before``, an earlier part."""
        later, earlier = self.layout.parts[part], self.layout.parts[before]
        return before < part and later.begin - later.ahead < earlier.stop

    def _gap(self, part: int, before: int) -> int:
        return self.layout.parts[part].begin - self.layout.parts[before].stop

    def _at_most(self, tokens: int, gap: int) -> int:
        """Of ``tokens`` next to a gap, those from which the window spans it."""
        return tokens if self.window is None else max(0, min(tokens, self.window - 1 - gap))


def own_block(share: Share, part: int, ahead: int) -> Block:
    """One of this rank's parts, which sees itself and the ``ahead`` tokens before it."""
    piece = share.layout.parts[part]
    start = share.documents.start[piece.begin : piece.stop]
    return Block(start, piece.begin, piece.begin - ahead, len(piece) + ahead, share)


def cross_block(share: Share, reach: Reach, part: int, before: int) -> Block:
    """The first tokens of one of this rank's parts, which see the last ones of an earlier part."""
    piece, keys = share.layout.parts[part], reach.seen(part, before)
    start = share.documents.start[piece.begin : piece.begin + reach.looking(part, before)]
    return Block(start, piece.begin, share.layout.parts[before].stop - keys, keys, share)


def add_leaving(sums: torch.Tensor, more: torch.Tensor, share: Share, reach: Reach) -> None:
    """Add to this rank's rows, in place, what there is for those that leave.

    Args:
        sums: (n, ...), this rank's.
        more: (rows that leave, ...).
    """
    add_ranges(sums, more, reach.leaving_rows(share.rank))


def add_ranges(sums: torch.Tensor, more: torch.Tensor, ranges: Iterable[slice]) -> None:
    """Add the rows of ``more``, in order, to these rows of ``sums``, in place."""
    begin = 0
    for some in ranges:
        end = begin + some.stop - some.start
        sums[some] += more[begin:end]
        begin = end
