"""Device memory over one step: what was alive when, and what the step was doing."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from components.titan.memory.places import Place

Category = Literal[
    "parameters", "gradients", "optimizer state", "kept", "activations", "temporary", "other"
]

CATEGORIES: dict[Category, str] = {
    "parameters": "parameters and buffers, FSDP's gathered ones included",
    "gradients": "gradients of parameters",
    "optimizer state": "AdamW's moments",
    "kept": "layers' inputs, and what recomputed layers keep until backward",
    "activations": "what forward, or the repeated forward, saved for backward",
    "temporary": "made and freed within one phase, and gradients of activations",
    "other": "everything else: inputs, tables, metrics, libraries' workspaces",
}
"""Category -> what it holds, from the bottom of the picture to its top."""


@dataclass
class Block:
    """Memory from its allocation to its release.

    Attributes:
        nbytes: size.
        born: seconds since the step began; at most 0 for what was there before.
        died: seconds since the step began, None if it outlived the step.
        place: what was at work at its birth.
        category: what it turned out to be.
        shape: of the tensor it was made for; None where only the allocator knows of it.
        dtype: "float32", or "".
        maker: operation, or file and line, that asked for it.
        name: the parameter that it is, or belongs to; "" for activations.
    """

    nbytes: int
    born: float
    died: float | None = None
    place: Place = field(default_factory=lambda: Place("data"))
    category: Category = "other"
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    maker: str = ""
    name: str = ""

    def alive_at(self, time: float) -> bool:
        """Whether it is there at a time; it is at its birth, and not at its death."""
        return self.born <= time and (self.died is None or time < self.died)


@dataclass(frozen=True)
class Phase:
    """A stretch of the step: one layer's forward, the loss, one layer's backward, ...

    Attributes:
        name: "forward layers.3", "loss", "optimizer", ...
        work: what kind of work it is.
        start: seconds since the step began; it lasts until the next phase starts.
    """

    name: str
    work: str
    start: float


@dataclass(frozen=True)
class Peak:
    """The moment with most bytes alive.

    Attributes:
        time: seconds since the step began.
        nbytes: bytes alive then.
        phase: the phase it falls into.
        module: the module at work, "" for none.
    """

    time: float
    nbytes: int
    phase: str
    module: str


@dataclass
class Timeline:
    """One step of one rank.

    Attributes:
        title: what was run, for the picture.
        source: how it was measured.
        blocks: everything that was alive at some time of the step.
        phases: in order; the first starts with the step.
        modules: (seconds, module at work from then on), in order.
        duration: seconds.
    """

    title: str
    source: str
    blocks: list[Block]
    phases: list[Phase]
    modules: list[tuple[float, str]]
    duration: float

    @cached_property
    def times(self) -> np.ndarray:
        """(events,) seconds, ascending: 0 and every birth and death after it."""
        moments = {0.0}
        for block in self.blocks:
            moments.add(max(block.born, 0.0))
            if block.died is not None:
                moments.add(max(block.died, 0.0))
        return np.array(sorted(moments))

    @cached_property
    def curves(self) -> np.ndarray:
        """(categories, events) bytes alive from each time on, in the order of ``CATEGORIES``."""
        rows = {category: row for row, category in enumerate(CATEGORIES)}
        change = np.zeros((len(rows), len(self.times)), dtype=np.int64)
        births = np.searchsorted(self.times, [max(b.born, 0.0) for b in self.blocks])
        for block, birth in zip(self.blocks, births, strict=True):
            change[rows[block.category], birth] += block.nbytes
            if block.died is not None:
                death = np.searchsorted(self.times, max(block.died, 0.0))
                change[rows[block.category], death] -= block.nbytes
        return change.cumsum(axis=1)

    @cached_property
    def totals(self) -> np.ndarray:
        """(events,) bytes alive from each time on."""
        return self.curves.sum(axis=0)

    @cached_property
    def peak(self) -> Peak:
        """Where the total is largest, for the first time."""
        index = int(self.totals.argmax())
        time = float(self.times[index])
        return Peak(time, int(self.totals[index]), self.phase_at(time).name, self.module_at(time))

    def phase_at(self, time: float) -> Phase:
        """The phase at a time."""
        starts = [phase.start for phase in self.phases]
        return self.phases[max(int(np.searchsorted(starts, time, side="right")) - 1, 0)]

    def module_at(self, time: float) -> str:
        """The module at work at a time, "" for none."""
        starts = [start for start, _ in self.modules]
        index = int(np.searchsorted(starts, time, side="right")) - 1
        return self.modules[index][1] if index >= 0 else ""

    def alive_at(self, time: float) -> list[Block]:
        """Blocks at a time, largest first."""
        return sorted((b for b in self.blocks if b.alive_at(time)), key=lambda b: -b.nbytes)

    def thinned(self, points: int) -> np.ndarray:
        """Indices of at most ``points`` events, the peak among them: each stretch's largest."""
        if len(self.times) <= points:
            return np.arange(len(self.times))
        edges = np.linspace(0, len(self.times), points + 1).astype(int)
        picked = [
            a + int(self.totals[a:b].argmax()) for a, b in zip(edges, edges[1:], strict=False)
        ]
        return np.array(picked)
