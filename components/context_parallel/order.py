"""Rows of all ranks between the order in which ranks hold them and the order of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.packed import bounds
from kernels.tables import remembered


@dataclass(frozen=True)
class Order:
    """Where rows are that belong to the parts of a batch, each part held by one rank.

    A rank's rows are those of its parts, ascending. "Packed" are the rows of all ranks, one rank
    after the other; "padded" the same with every rank's brought to ``most`` rows.

    Attributes:
        counts: rows of each part, in the order of the batch.
        owners: rank of each part.
        sizes: rows of each rank.
    """

    counts: tuple[int, ...]
    owners: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(counts: tuple[int, ...], owners: tuple[int, ...]) -> "Order":
        """``owners`` names every rank at least once."""
        sizes = [0] * (max(owners) + 1)
        for count, owner in zip(counts, owners, strict=True):
            sizes[owner] += count
        return Order(counts, owners, tuple(sizes))

    @property
    def most(self) -> int:
        """Rows of the rank with the most."""
        return max(self.sizes)

    @property
    def in_order(self) -> bool:
        """Whether packed rows are in the order of the batch."""
        return list(self.owners) == sorted(self.owners)

    @property
    def even(self) -> bool:
        """Whether all ranks have as many rows, so that padded rows are the packed ones."""
        return self.sizes.count(self.most) == len(self.sizes)

    def index(self, rank: int, device: torch.device) -> torch.Tensor:
        """int64 (rows of ``rank``,): where its rows are in the batch."""
        begin = sum(self.sizes[:rank])
        return self.batch_of_packed(device)[begin : begin + self.sizes[rank]]

    def batch_of_packed(self, device: torch.device) -> torch.Tensor:
        """int64 (all rows,): for each packed row its place in the batch."""
        return _tables(self, device)[0]

    def packed_of_batch(self, device: torch.device) -> torch.Tensor:
        """int64 (all rows,): for each row of the batch its packed place."""
        return _tables(self, device)[1]

    def padded_of_batch(self, device: torch.device) -> torch.Tensor:
        """int64 (all rows,): for each row of the batch its padded place."""
        return _tables(self, device)[2]


# A batch has three orders: of tokens, pools and states. Tables of a million tokens take 24 MB.
@remembered(8)
def _tables(order: Order, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    begins = bounds(order.counts)
    packed = _ranges([(begins[p], order.counts[p]) for p in _by_rank(order.owners)])
    shift = torch.tensor([r * order.most - b for r, b in enumerate(bounds(order.sizes)[:-1])])
    padded = torch.arange(len(packed)) + shift.repeat_interleave(torch.tensor(order.sizes))
    of_batch = torch.empty_like(packed).scatter_(0, packed, torch.arange(len(packed)))
    padded_of_batch = padded[of_batch]
    found = (packed, of_batch, padded_of_batch)
    packed, of_batch, padded_of_batch = (t.to(device, non_blocking=True) for t in found)
    return packed, of_batch, padded_of_batch


def _by_rank(owners: Sequence[int]) -> list[int]:
    """Parts in the order in which ranks hold them."""
    return sorted(range(len(owners)), key=lambda part: owners[part])


def _ranges(runs: list[tuple[int, int]]) -> torch.Tensor:
    """Runs of consecutive numbers, (first, count) each, one after the other."""
    return torch.cat([torch.arange(first, first + count) for first, count in runs])
