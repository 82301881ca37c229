"""Places in a slab: taken for each thing that is stored, given back when it is not needed."""

from bisect import insort
from dataclasses import dataclass

import torch

from components.offload.slabs import Slab

ALIGNMENT = 256
"""Bytes; a place begins at a multiple of it, as copy engines like it."""


def aligned(nbytes: int) -> int:
    """Bytes that something of ``nbytes`` takes in a slab."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Place:
    """Where something is stored.

    Attributes:
        start: offset into the slab, bytes.
        nbytes: its size, without what alignment adds.
        generation: how often the arena had been cleared when the place was taken.
    """

    start: int
    nbytes: int
    generation: int


class Arena:
    """First free place that is large enough. Boundaries come back in reverse order, so that free
    memory is one piece again at the end of every micro-batch."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._generation = 0
        self._free: list[tuple[int, int]] = []
        self.clear()

    @property
    def free(self) -> int:
        """Bytes that are not taken."""
        return sum(end - start for start, end in self._free)

    def take(self, nbytes: int) -> Place | None:
        """A place for ``nbytes`` bytes, or None if there is no gap of that size."""
        size = aligned(nbytes)
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return Place(start, nbytes, self._generation)
        return None

    def view(self, place: Place) -> torch.Tensor:
        """The memory of a place: uint8 (nbytes,) on the host."""
        return self._slab.view(place.start, place.nbytes)

    def holds(self, place: Place) -> bool:
        """Whether a place is its taker's still: one from before the last ``clear`` is not."""
        return place.generation == self._generation

    def give(self, place: Place) -> None:
        """Hand a place back, if it has not been taken back already."""
        if not self.holds(place):
            return
        insort(self._free, (place.start, place.start + aligned(place.nbytes)))
        joined: list[tuple[int, int]] = []
        for start, end in self._free:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        self._free = joined

    def clear(self) -> None:
        """Take every place back."""
        self._generation += 1
        self._free = [(0, self._slab.payload)]
