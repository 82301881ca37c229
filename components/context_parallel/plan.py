"""What a recipe asks of context parallelism, made definite: the cut, the methods, the sizes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.context_parallel.collectives import Link
from components.context_parallel.layout import Kind, Layout, cut_batch
from components.context_parallel.volume import Volume

if TYPE_CHECKING:
    from components.titan.plan import RunPlan


@dataclass(frozen=True)
class SplitPlan(ABC):
    """How a recipe is split over its context ranks. A family of models has a subclass.

    Attributes:
        ranks: C.
        kind: how a batch is cut.
        align: tokens; a part begins at a multiple of it within its first document.
        methods: by the name of a kind of mixer, of each that the model has. Names of counted bytes
            begin with it.
        tokens: whose mixer one rank computes, on average.
        element_size: bytes of an activation.
    """

    ranks: int
    kind: Kind
    align: int
    methods: dict[str, str]
    tokens: int
    element_size: int

    def cut(self, lengths: tuple[int, ...]) -> Layout:
        """See ``cut_batch``."""
        return cut_batch(lengths, self.ranks, self.kind, self.align)

    @abstractmethod
    def layers(self, mixer: str) -> int:
        """Layers with a mixer."""

    @abstractmethod
    def volume(self, mixer: str) -> Volume:
        """Bytes that one rank sends for one layer and pass; the one that sends most."""

    @abstractmethod
    def exchanged(self, mixer: str) -> int:
        """Bytes on one rank, at most, of what a layer exchanges beyond what it holds by itself."""

    @abstractmethod
    def install(self, owner: str, plan: "RunPlan") -> None:
        """Put mixers that exchange in place of the model's own, in the name of a component."""

    def meet(self, link: Link) -> None:
        """Make what ranks need beyond ``link`` to exchange. All of them call it, once."""
        return None
