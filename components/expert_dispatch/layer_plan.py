"""What one layer's ranks know of each other before any row moves: one exchange of counts.

Chunks share the layer's plan. In every chunk each piece takes the same share of its expert's rows
as in the layer, so a chunk that is routed like the layer is as balanced, up to rounding, and the
counts of every rank, chunk and expert say how many rows go where: nothing else is asked.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from components.expert_dispatch.exchange import Exchange, exchange
from components.expert_dispatch.partition import Partition
from components.expert_dispatch.plan import Plan, imbalance, plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRule:
    """The settings of ``plan``; all ranks of a group have the same.

    Raises:
        ValueError: a number below 1, or none.
    """

    capacity_factor: float = 1.0
    """Rows of a rank at most, as a multiple of the mean; 1 or more."""

    minimum_rows: int = 1024
    """Rows of an expert that are worth handing on; 1 or more."""

    threshold: float = 1.0
    """Fullest rank over the mean below which nothing moves; 1 or more."""

    def __post_init__(self) -> None:
        for name in ("capacity_factor", "minimum_rows", "threshold"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 1):
                raise ValueError(f"{name} is {value}; legal: 1 or more")

    @property
    def settings(self) -> dict[str, int | float]:
        """By name, each of one type whatever it was given as; see ``partition.agree``."""
        return {
            "capacity_factor": float(self.capacity_factor),
            "minimum_rows": self.minimum_rows,
            "threshold": float(self.threshold),
        }

    def plan(self, loads: torch.Tensor, ranks: int) -> Plan:
        """See ``plan``."""
        return plan(loads, ranks, self.capacity_factor, self.minimum_rows, self.threshold)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """One layer's plan and its chunks; the same on every rank but for ``rank`` and ``partition``.
    Recomputable from its fields, on the host."""

    rank: int
    """This rank, within the group."""

    counts: torch.Tensor
    """Routes of each rank, in each chunk, to each expert: int64 (P, K, E), on the CPU."""

    partition: Partition
    """Of this rank's tokens."""

    rule: PlanRule

    _made: dict[int, Exchange] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def plan(self) -> Plan:
        """Of all chunks together."""
        return self.rule.plan(self.counts.sum((0, 1)), len(self.counts))

    def chunk(self, index: int) -> Exchange:
        """The rows of a chunk; holdings are numbered as in ``plan``. Made when first asked for: the
        device computes the chunks before it meanwhile."""
        if index not in self._made:
            counts = self.counts[:, index]
            self._made[index] = exchange(scaled(self.plan, counts.sum(0)), counts)
        return self._made[index]

    @property
    def chunks(self) -> tuple[Exchange, ...]:
        """All of them."""
        return tuple(self.chunk(index) for index in range(self.counts.shape[1]))

    @property
    def local_experts(self) -> int:
        """Experts that live on a rank."""
        return self.counts.shape[2] // len(self.counts)

    def load(self, row_bytes: int, expert_bytes: int) -> "LayerLoad":
        """What a user wants to know of it. Waits for nothing.

        Args:
            row_bytes: of one row as it is exchanged.
            expert_bytes: of one expert's weights as they are copied.
        """
        rows = self.plan.rank_rows
        total = int(rows.sum())
        peak = max(sum(chunk.received(self.rank)) for chunk in self.chunks)
        copies = sum(move.native == self.rank for move in self.plan.transfers)
        return LayerLoad(
            before=imbalance(self.plan.loads, self.plan.ranks),
            after=int(rows.max()) * len(rows) / total if total else 1.0,
            chunks=len(self.chunks),
            receive_peak=peak,
            receive_peak_bytes=peak * row_bytes,
            copies_sent=copies,
            copied_bytes=copies * expert_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """Numbers about one forward of one layer on one rank; holds no tensor."""

    before: float
    """Rows of the fullest rank over the mean, if nothing were handed on."""

    after: float
    """The same under the plan."""

    chunks: int

    receive_peak: int
    """Rows that this rank received in one chunk, its own tokens' included, at most."""

    receive_peak_bytes: int

    copies_sent: int
    """Experts whose weights this rank sent to others, once per copy; again in backward."""

    copied_bytes: int
    """Of these weights."""


def scaled(whole: Plan, loads: torch.Tensor) -> Plan:
    """The same holdings and transfers for a part of the rows.

    A piece's ends move to the nearest row of the same share, so that a rank computes at most one
    row more per piece and part than its share.

    Args:
        loads: rows of every expert in this part, int64 (E,); 0 where the whole has none.
    """
    of_whole = whole.loads.clamp(min=1)[whole.expert]
    of_part = loads[whole.expert]

    def move(row: torch.Tensor) -> torch.Tensor:
        return (2 * row * of_part + of_whole).div(2 * of_whole, rounding_mode="floor")

    # The last row of an expert is the last of the part's: shares of 1 are exact. So is 0.
    return replace(whole, loads=loads, begin=move(whole.begin), end=move(whole.end))
