"""The rows of one chunk on their way: to the ranks that compute them, and home."""

import torch
import torch.distributed as dist

from components.expert_dispatch.exchange import Exchange, Placement
from kernels.precision import accumulation_dtype


class ChunkRows:
    """Orders and sizes of one chunk on one rank. Nothing here waits for the device.

    At home rows are sorted by the holding that they go to. Where they are computed, they are sorted
    by holding and, within one, by source.

    Attributes:
        ids: experts of every token (T, k), ascending within a token.
        choice: which of the token's routes each of these is, int64 (T, k).
        place: row of each of these in home order, int64 (T, k).
        place_of_route: row of every route, as the router lists them, int64 (T, k).
        native, foreign: rows of each expert that is computed here, int64 (own,) and (others,).
        native_rows: all rows of native experts; they come first.
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
        self._group, self._top_k = group, ids.shape[1]
        self._sent, self._received = rows.sent(rank), rows.received(rank)
        device = ids.device
        placement = Placement.of(rows.plan, device)
        on_device = counts.to(device, non_blocking=True)
        order = placement.holdings(ids, on_device, rank).flatten().argsort(stable=True)
        self._order, self._token = order, order // self._top_k
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
        # Summed in the order of experts, whoever computed them: as without a plan.
        self.choice = ids.argsort(dim=1, stable=True)
        self.place_of_route = place.view(ids.shape)
        self.place = self.place_of_route.gather(1, self.choice)
        self._sorted = _by_holding(rows.arrivals(rank), device)
        own = len(rows.plan.loads) // rows.plan.ranks
        held = rows.rows[:, rows.plan.of_rank(rank)].sum(0)
        self.native_rows = int(held[:own].sum())
        held = held.to(device, non_blocking=True)
        self.native, self.foreign = held[:own], held[own:]

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's tokens (T, D) -> of the rows that are computed here (R, D)."""
        return self.out(x[self._token])

    def dispatch_routes(self, values: torch.Tensor) -> torch.Tensor:
        """One value of every route of this rank (T, k) -> those of the rows computed here (R,)."""
        return self.out(values.flatten()[self._order])

    def out(self, at_home: torch.Tensor) -> torch.Tensor:
        """Rows in home order (T k, ...) -> those that are computed here (R, ...)."""
        arrived = at_home.new_empty(sum(self._received), *at_home.shape[1:])
        dist.all_to_all_single(arrived, at_home, self._received, self._sent, group=self._group)
        return arrived[self._sorted]

    def home(self, computed: torch.Tensor) -> torch.Tensor:
        """Rows that were computed here (R, ...) -> this rank's in home order (T k, ...)."""
        leaving = torch.empty_like(computed)
        leaving[self._sorted] = computed
        returned = computed.new_empty(sum(self._sent), *computed.shape[1:])
        dist.all_to_all_single(returned, leaving, self._sent, self._received, group=self._group)
        return returned

    def sum_routes(self, at_home: torch.Tensor) -> torch.Tensor:
        """Rows in home order (T k, D) -> their sums by token (T, D), rounded once."""
        wide = accumulation_dtype(at_home.dtype)
        total = at_home.new_zeros(len(self.place), at_home.shape[1], dtype=wide)
        for route in range(self._top_k):
            total += at_home[self.place[:, route]]
        return total.to(at_home.dtype)


def _by_holding(arrivals: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Which arrived row is first, second, ... once they are sorted by holding, then source.

    Args:
        arrivals: rows of each source for each holding, (P, held), on the CPU.

    Returns:
        int64 (R,), on ``device``.
    """
    starts = (arrivals.flatten().cumsum(0) - arrivals.flatten()).view_as(arrivals).t().flatten()
    sizes = arrivals.t().flatten()
    total = int(sizes.sum())
    # Where a segment starts before the sort, less where it starts after it.
    shift = starts - (sizes.cumsum(0) - sizes)
    sizes, shift = torch.stack([sizes, shift]).to(device, non_blocking=True)
    by_row = shift.repeat_interleave(sizes, output_size=total)
    return by_row + torch.arange(total, device=device)
