"""Which rows of the vocabulary projection each rank of a ring computes with."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class VocabularyLayout:
    """Rows of a (vocabulary, H) weight, cut as FSDP2 cuts it and used by rings of ranks.

    FSDP rank ``r`` of ``ranks`` holds the rows ``[r * chunk, (r + 1) * chunk)`` that exist, with
    ``chunk = ceil(vocabulary / ranks)``: the last ranks hold fewer, or none. ``ring`` consecutive
    ranks form a ring. Rank ``q`` of a ring computes with the shards of the FSDP ranks ``q``,
    ``q + ring``, ``q + 2 * ring``, ..., one after the other: its *compute shard*. So every ring
    has the whole vocabulary, and rank ``q`` of each ring has the same rows.

    Only the shards of the last ranks are short. Therefore local row numbers need no table, and
    shards that were padded to ``chunk`` rows and gathered have all their padding at the end.

    Attributes:
        vocabulary: rows of the whole weight, at least 1.
        ranks: FSDP ranks that share it, at least 1.
        ring: ranks of one ring; divides ``ranks``.

    Raises:
        ValueError: a number is below 1, or ``ring`` does not divide ``ranks``.
    """

    vocabulary: int
    ranks: int
    ring: int

    def __post_init__(self) -> None:
        for name in ("vocabulary", "ranks", "ring"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.ranks % self.ring:
            legal = [n for n in range(1, self.ranks + 1) if self.ranks % n == 0]
            raise ValueError(
                f"ring is {self.ring}, which does not divide the {self.ranks} ranks that share "
                f"the vocabulary; legal: {', '.join(map(str, legal))}"
            )

    @property
    def chunk(self) -> int:
        """Rows of a full FSDP shard."""
        return -(-self.vocabulary // self.ranks)

    @property
    def padded_rows(self) -> int:
        """Rows of a compute shard whose pieces are all padded to ``chunk`` rows."""
        return self.chunk * (self.ranks // self.ring)

    @property
    def widest(self) -> int:
        """Rows of the largest compute shard, which is ring rank 0's."""
        return self.rows(0)

    def shard(self, rank: int) -> range:
        """Rows of the whole weight that FSDP rank ``rank`` holds; may be empty."""
        begin = min(rank * self.chunk, self.vocabulary)
        return range(begin, min(begin + self.chunk, self.vocabulary))

    def pieces(self, q: int) -> Iterator[range]:
        """Rows of the whole weight that ring rank ``q`` computes with, in its local order."""
        for rank in range(q, self.ranks, self.ring):
            yield self.shard(rank)

    def rows(self, q: int) -> int:
        """Rows of ring rank ``q``'s compute shard; may be 0."""
        return sum(len(piece) for piece in self.pieces(q))

    def owner_and_row(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the vocabulary entries ``targets`` (any shape, int64, in range) are computed.

        Returns:
            Ring ranks and rows of their compute shards, both int64 and shaped like ``targets``.
        """
        rank = targets // self.chunk
        row = rank // self.ring * self.chunk + targets % self.chunk
        return rank % self.ring, row

    def columns(self, targets: torch.Tensor, q: int) -> torch.Tensor:
        """Columns of ring rank ``q``'s strip of logits that hold ``targets``; -1 where another
        rank has the target. int64, shaped like ``targets``."""
        owner, row = self.owner_and_row(targets)
        return torch.where(owner == q, row, -1)
