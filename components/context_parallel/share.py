"""One rank's share of a batch: its tokens, what the rest of the batch is, and how to reach it."""

from dataclasses import dataclass
from functools import cached_property

import torch

from components.context_parallel.collectives import Link
from components.context_parallel.layout import DEGREE, Layout
from components.models.glm_flash.chunked.pieces import Piece
from components.models.glm_flash.documents import Documents


@dataclass(frozen=True, eq=False)
class Share:
    """What a mixer is given in place of ``Documents`` when its tokens are a share of the batch.

    Attributes:
        layout: how the batch is cut.
        documents: of the whole batch; its lengths are the layout's.
        link: to the other ranks.

    Raises:
        ValueError: the group has more or fewer ranks than the layout, or the documents differ.
    """

    layout: Layout
    documents: Documents
    link: Link

    def __post_init__(self) -> None:
        if self.link.size != self.layout.ranks:
            raise ValueError(
                f"{DEGREE}: the batch is cut for {self.layout.ranks} ranks and the group has "
                f"{self.link.size}; legal: the same number"
            )
        if self.documents.lengths != self.layout.lengths:
            raise ValueError(
                f"documents: {len(self.documents.lengths)} of {sum(self.documents.lengths)} tokens "
                f"beside a layout of {len(self.layout.lengths)} of {self.layout.tokens}; legal: "
                "those that the batch was cut by"
            )

    @property
    def rank(self) -> int:
        """This rank, within the group."""
        return self.link.rank

    @property
    def device(self) -> torch.device:
        """Where the documents' tensors are."""
        return self.documents.position.device

    @cached_property
    def parts(self) -> tuple[Piece, ...]:
        """The parts that this rank holds, in the order of its tokens."""
        return tuple(self.layout.parts[p] for p in self.layout.held(self.rank))

    @cached_property
    def rows(self) -> tuple[slice, ...]:
        """Where each part is among this rank's tokens."""
        return self.layout.rows(self.rank)

    @cached_property
    def index(self) -> torch.Tensor:
        """int64 (n,): where this rank's n tokens are in the batch."""
        return self.layout.order.index(self.rank, self.device)

    @cached_property
    def position(self) -> torch.Tensor:
        """int64 (n,): distance of this rank's tokens from the first token of their documents."""
        return self.documents.position[self.index]

    @cached_property
    def start(self) -> torch.Tensor:
        """int64 (n,): where in the batch the documents of this rank's tokens start."""
        return self.documents.start[self.index]

    def take(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor of the whole batch, (all tokens, ...) -> (n, ...)."""
        return batch[self.index]

    def check_rows(self, x: torch.Tensor) -> None:
        """Raise ValueError unless ``x`` has a row for each of this rank's tokens."""
        expected = self.layout.tokens_of(self.rank)
        if len(x) != expected:
            raise ValueError(
                f"x: {len(x)} rows; legal on rank {self.rank} of {self.layout.ranks}: {expected}"
            )
