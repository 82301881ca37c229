"""The rows of one chunk on one rank: how many go where, and in which order they lie.

Three orders. At home, routes are sorted by the holding that they go to, those of this rank first.
As they arrive, rows are sorted by source, those of this rank last. So what other ranks send or get
is one stretch each way, and a rank's own rows need not be sent to itself. Where they are computed,
rows are sorted by holding and, within one, by source.
"""

from functools import cached_property

import torch
import torch.distributed as dist

from components.expert_dispatch.exchange import Exchange, Placement, sortable


class ChunkRows:
    """Orders and sizes of one chunk on one rank. Nothing here waits for the device.

    Attributes:
        group: whose ranks exchange rows.
        rank: this one's, within the group.
        tokens: of every rank in this chunk.
        own: rows of this rank's tokens that are computed here.
        sent, received: rows to and from each rank; 0 for this one.
        leaving, returning: their sums, received and sent: rows that go home from here, or come.
        order: the route in each place of the home order, int64 (T k,).
        token: its token, int64 (T k,).
        choice: which of a token's routes is first, second, ... by expert, int64 (T, k).
        place: place in the home order of each of these, int64 (T, k).
        place_of_route: that of every route, as the router lists them, int64 (T, k).
        arrival: place in the order of arrival of every row as it is computed, int64 (R,).
        native_sizes, foreign_sizes: rows of each expert that is computed here, by whether it lives
            here. Rows of native experts come first.
        native, foreign: where they end, among the native and among the foreign rows, int32 (own,)
            and (others,).
    """

    def __init__(
        self,
        rows: Exchange,
        counts: torch.Tensor,
        ids: torch.Tensor,
        rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        """
        Args:
            rows: of this chunk.
            counts: that it was made of, (P, E), on the CPU.
            ids: this rank's, of this chunk, int64 (T, k).
            rank: this one's, within the group.
        """
        self.group, self.rank = group, rank
        self._top_k = ids.shape[1]
        self.tokens: list[int] = counts.sum(1).div(self._top_k, rounding_mode="floor").tolist()
        self.sent, self.received = rows.sent(rank), rows.received(rank)
        self.own = self.sent[rank]
        self.sent[rank] = self.received[rank] = 0
        self.leaving, self.returning = sum(self.received), sum(self.sent)
        self._order_routes(rows, counts, ids)
        device = ids.device
        self.arrival = _by_holding(rows.arrivals(rank), rank, device)
        share = len(rows.plan.loads) // rows.plan.ranks
        held = rows.rows[:, rows.plan.of_rank(rank)].sum(0)
        native, foreign = held[:share], held[share:]
        self.native_sizes: list[int] = native.tolist()
        self.foreign_sizes: list[int] = foreign.tolist()
        ends = torch.cat([native.cumsum(0), foreign.cumsum(0)]).int()
        ends = ends.to(device, non_blocking=True)
        self.native, self.foreign = ends[:share], ends[share:]

    def _order_routes(self, rows: Exchange, counts: torch.Tensor, ids: torch.Tensor) -> None:
        device = ids.device
        holdings = Placement.of(rows.plan, device).holdings(ids, counts, self.rank)
        turn = _own_first(rows, self.rank).to(device, non_blocking=True)
        turns = sortable(turn, len(turn))[holdings]
        self.order = turns.flatten().argsort(stable=True)
        self.token = self.order // self._top_k
        positions = torch.arange(len(self.order), device=device)
        place = torch.empty_like(self.order).scatter_(0, self.order, positions)
        # Summed in the order of experts, whoever computed them: as without a plan.
        self.choice = sortable(ids, counts.shape[1]).argsort(dim=1, stable=True)
        self.place_of_route = place.view(ids.shape)
        self.place = self.place_of_route.gather(1, self.choice)

    @cached_property
    def whole(self) -> bool:
        """Whether ranks send each other all of their tokens once, rather than a row per route.

        With more routes than ranks most tokens have several routes to each rank.
        """
        return len(self.tokens) < self._top_k

    @property
    def computed(self) -> int:
        """Rows that are computed here, R."""
        return self.leaving + self.own


def _own_first(rows: Exchange, rank: int) -> torch.Tensor:
    """Turn of every holding at home, int64 (H,): this rank's, then all others."""
    own = rows.plan.of_rank(rank)
    held, holdings = own.stop - own.start, len(rows.plan.rank)
    before = torch.arange(held, own.stop)
    return torch.cat([before, torch.arange(held), torch.arange(own.stop, holdings)])


def _by_holding(arrivals: torch.Tensor, rank: int, device: torch.device) -> torch.Tensor:
    """Which arrived row is first, second, ... once they are sorted by holding, then source.

    Args:
        arrivals: rows of each source for each holding, (P, held), on the CPU.
        rank: of the source that comes last.

    Returns:
        int64 (R,), on ``device``.
    """
    sources = [source for source in range(len(arrivals)) if source != rank] + [rank]
    arriving = arrivals[sources].flatten()
    starts = torch.empty_like(arrivals)
    starts[sources] = (arriving.cumsum(0) - arriving).view_as(arrivals)
    sizes = arrivals.t().flatten()
    total = int(sizes.sum())
    # Where a segment starts before the sort, less where it starts after it.
    shift = starts.t().flatten() - (sizes.cumsum(0) - sizes)
    sizes, shift = torch.stack([sizes, shift]).to(device, non_blocking=True)
    by_row = shift.repeat_interleave(sizes, output_size=total)
    return by_row + torch.arange(total, device=device)
