"""Bring the tokens before each part that it sees, and return their gradients.

Neither is kept between forward and backward: backward brings the rows again. Gradients travel in
full precision and are rounded once, with the rank's own.
"""

from collections.abc import Iterable
from typing import Protocol

import torch

from components.context_parallel.collectives import Direction, collect, send_rows, sum_shares
from components.context_parallel.share import Share
from components.context_parallel.softmax.reach import Reach, add_leaving, add_ranges


class Fetch(Protocol):
    """How rows get to the parts that see them. All ranks call alike."""

    def bring(
        self, rows: torch.Tensor, share: Share, reach: Reach, direction: Direction
    ) -> list[torch.Tensor]:
        """For each part of this rank, the rows before it that it sees, consecutive.

        Args:
            rows: (n, ...), this rank's.
        """

    def send_back(
        self, grads: Iterable[torch.Tensor], sums: torch.Tensor, share: Share, reach: Reach
    ) -> None:
        """Add what all ranks have for this rank's rows.

        Args:
            grads: as ``bring`` returned rows, or narrower; asked for one at a time, as each may be
                as large as all keys, and all before ``sums`` is added to.
            sums: (n, ...), this rank's, in the dtype to sum in; changed in place.
        """


class GatherAll:
    """Every rank gets all rows that leave: C - 1 copies of each travel."""

    def bring(
        self, rows: torch.Tensor, share: Share, reach: Reach, direction: Direction
    ) -> list[torch.Tensor]:
        """See ``Fetch``."""
        if not reach.order.most:
            return [rows[:0] for _ in share.parts]
        mine = torch.cat([rows[r] for r in reach.leaving_rows(share.rank)])
        whole = collect(mine, reach.order, share.link, "softmax.keys_values", direction)
        return [whole[some] for some in _before(share, reach)]

    def send_back(
        self, grads: Iterable[torch.Tensor], sums: torch.Tensor, share: Share, reach: Reach
    ) -> None:
        """See ``Fetch``."""
        whole = sums.new_zeros(reach.begins[-1], *sums.shape[1:])
        parts = iter(grads)
        for some in _before(share, reach):
            # Without a name, which would keep one while the next is worked out.
            whole[some] += next(parts)
        if reach.order.most:
            mine = sum_shares(whole, reach.order, share.link, "softmax.gradients")
            add_leaving(sums, mine, share, reach)


def _before(share: Share, reach: Reach) -> list[slice]:
    """Where the rows that each of this rank's parts sees are among all that leave."""
    ends = [reach.begins[p] for p in share.layout.held(share.rank)]
    return [
        slice(end - reach.ahead(p), end)
        for p, end in zip(share.layout.held(share.rank), ends, strict=True)
    ]


class SendSeen:
    """Every part gets the rows that it sees, from the ranks that hold them: nothing else travels.

    In a layer with a window they are those just before the part: its neighbour's, or, where the
    window is longer than a part, also those of the part before.
    """

    def bring(
        self, rows: torch.Tensor, share: Share, reach: Reach, direction: Direction
    ) -> list[torch.Tensor]:
        """See ``Fetch``."""
        messages = _Messages(share, reach)
        leaving = [rows[some] for _, some in messages.leaving]
        arrived = send_rows(
            torch.cat([rows[:0], *leaving]), messages.send, messages.receive, share.link,
            "window.keys_values", direction,
        )  # fmt: skip
        brought: dict[int, list[torch.Tensor]] = {p: [rows[:0]] for p in messages.held}
        pieces = arrived.split([count for _, _, count in messages.arriving])
        # By the part that they come from: then a part's rows are consecutive.
        for (part, _, _), piece in sorted(
            zip(messages.arriving, pieces, strict=True), key=lambda pair: pair[0][:2]
        ):
            brought[part].append(piece)
        return [torch.cat(brought[part]) for part in messages.held]

    def send_back(
        self, grads: Iterable[torch.Tensor], sums: torch.Tensor, share: Share, reach: Reach
    ) -> None:
        """See ``Fetch``."""
        messages = _Messages(share, reach)
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        for part, grad in zip(messages.held, grads, strict=True):
            mine = sorted((b, count) for p, b, count in messages.arriving if p == part)
            found = grad.split([count for _, count in mine])
            pieces |= {(part, b): piece for (b, _), piece in zip(mine, found, strict=True)}
        ordered = [pieces[part, before] for part, before, _ in messages.arriving]
        arrived = send_rows(
            torch.cat([sums[:0], *(piece.to(sums.dtype) for piece in ordered)]),
            messages.receive, messages.send, share.link, "window.gradients", "backward",
        )  # fmt: skip
        add_ranges(sums, arrived, (some for _, some in messages.leaving))


class _Messages:
    """Who sends what to whom, rank by rank; between two ranks by the part that sees it, then by
    the part that is seen."""

    def __init__(self, share: Share, reach: Reach) -> None:
        layout, rank = share.layout, share.rank
        self.held = layout.held(rank)
        rows = dict(zip(self.held, layout.rows(rank), strict=True))
        self.leaving: list[tuple[int, slice]] = []
        self.arriving: list[tuple[int, int, int]] = []
        for other in range(layout.ranks):
            for part in layout.held(other):
                for before in self.held:
                    if count := reach.seen(part, before):
                        stop = rows[before].stop
                        self.leaving.append((other, slice(stop - count, stop)))
            for part in self.held:
                for before in layout.held(other):
                    if count := reach.seen(part, before):
                        self.arriving.append((part, before, count))
        self.send = [0] * layout.ranks
        for other, some in self.leaving:
            self.send[other] += some.stop - some.start
        self.receive = [0] * layout.ranks
        for _, before, count in self.arriving:
            self.receive[layout.owners[before]] += count
