"""The tokens just before a part that its short convolutions still see."""

from dataclasses import dataclass

import torch

from components.context_parallel.collectives import exchange_rows
from components.context_parallel.share import Share
from components.models.glm_flash.chunked.pieces import Piece
from components.models.glm_flash.documents import Documents
from kernels.packed import bounds
from kernels.tables import remembered


@dataclass(frozen=True, eq=False)
class Halo:
    """Up to ``reach`` tokens before each part, where they belong to its first document.

    They come from the part before, so no part may be shorter than ``reach``.

    Raises:
        ValueError: one is.
    """

    share: Share
    reach: int

    def __post_init__(self) -> None:
        shortest = min(len(part) for part in self.share.layout.parts)
        if shortest < self.reach and self.share.layout.crosses:
            raise ValueError(
                f"align: parts of {shortest} tokens beside a convolution that reaches "
                f"{self.reach} back (model.conv_kernel); legal: an alignment of {self.reach} or "
                "more"
            )

    def extend(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Put the rows before each of this rank's parts in front of it; differentiable.

        Args:
            x: (n, ...), this rank's rows.
            name: for the count of bytes.

        Returns:
            (n + rows before, ...).
        """
        layout = self.share.layout
        if not layout.crosses or self.reach == 0:
            return x
        leaving = [self._leaving(rank) for rank in range(layout.ranks)]
        send = [sum(rows.stop - rows.start for rows in some) for some in leaving]
        receive = [sum(self._before(p) for p in self._arriving(r)) for r in range(layout.ranks)]
        sent = torch.cat([x[:0], *(x[rows] for some in leaving for rows in some)])
        arrived = exchange_rows(sent, send, receive, self.share.link, name)
        order = [p for r in range(layout.ranks) for p in self._arriving(r)]
        sizes = [self._before(p) for p in order]
        before = dict(zip(order, arrived.split(sizes), strict=True))
        held = layout.held(self.share.rank)
        pieces = [
            piece
            for p, rows in zip(held, self.share.rows, strict=True)
            for piece in (before.get(p), x[rows])
            if piece is not None
        ]
        # No rows, for a rank to which nothing comes: backward, in which all ranks exchange, must
        # come here on every one.
        return torch.cat([*pieces, arrived[:0]])

    def trim(self, extended: torch.Tensor) -> torch.Tensor:
        """Drop the rows that ``extend`` put in front."""
        if len(extended) == len(self.share.index):
            return extended
        ends = bounds(tuple(before + len(part) for before, part in self._held))
        begins = [b + before for b, (before, _) in zip(ends, self._held, strict=False)]
        return torch.cat([extended[b:e] for b, e in zip(begins, ends[1:], strict=True)])

    @property
    def documents(self) -> Documents:
        """Of the extended rows: what this rank has of a document counts as one of its own."""
        lengths: list[int] = []
        for before, part in self._held:
            first, *rest = part.lengths
            lengths += [before + first, *rest]
        return _documents(tuple(lengths), self.share.device)

    @property
    def _held(self) -> list[tuple[int, Piece]]:
        """Rows before each of this rank's parts, and the part."""
        layout = self.share.layout
        return [(self._before(p), layout.parts[p]) for p in layout.held(self.share.rank)]

    def _before(self, part: int) -> int:
        return min(self.reach, self.share.layout.parts[part].ahead)

    def _arriving(self, source: int) -> list[int]:
        """This rank's parts that are preceded, in the same document, by one of ``source``."""
        layout = self.share.layout
        held = layout.held(self.share.rank)
        return [p for p in held if self._before(p) and layout.owners[p - 1] == source]

    def _leaving(self, rank: int) -> list[slice]:
        """Rows of this rank that ``rank`` needs, in the order of its parts."""
        layout = self.share.layout
        rows = dict(zip(layout.held(self.share.rank), self.share.rows, strict=True))
        return [
            slice(rows[p - 1].stop - self._before(p), rows[p - 1].stop)
            for p in layout.held(rank)
            if self._before(p) and p - 1 in rows
        ]


@remembered(4)
def _documents(lengths: tuple[int, ...], device: torch.device) -> Documents:
    """The same object for all layers of a step."""
    # Made on the host: the lengths are known, and asking the device for them would wait.
    made = Documents.from_lengths(lengths)
    position, start = (t.to(device, non_blocking=True) for t in (made.position, made.start))
    return Documents(position, start, lengths)
