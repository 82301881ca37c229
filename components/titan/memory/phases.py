"""A step cut into phases, and blocks sorted into categories once the step is over."""

from bisect import bisect_right

from components.titan.memory.places import Place
from components.titan.memory.timeline import Block, Phase


def phase_name(place: Place) -> str:
    """What a place is called in the picture; "" where it goes on with the phase before it."""
    if place.layer:
        return f"{place.work} {place.layer}"
    if place.module:
        return place.work if place.work == "loss" else f"{place.work} {place.module.split('.')[0]}"
    # Between two modules of the model, or of its backward.
    within = ("forward", "backward", "recompute", "rebuild")
    return "" if place.work in within else place.work


class PhaseLog:
    """Collects phases and the modules at work from a tracker's changes.

    Attributes:
        phases: so far, times in seconds.
        places: (seconds, place) at each change.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.places: list[tuple[float, Place]] = []

    def change(self, place: Place, time: float) -> None:
        """The work goes on at another place."""
        self.places.append((time, place))
        name = phase_name(place)
        if name and (not self.phases or self.phases[-1].name != name):
            self.phases.append(Phase(name, place.work, time))

    def at(self, time: float) -> Place:
        """The place at a time."""
        index = bisect_right(self.places, time, key=lambda change: change[0]) - 1
        return self.places[max(index, 0)][1]


def sort_blocks(blocks: list[Block], phases: list[Phase]) -> None:
    """Give a category to the blocks that have none yet ("other") and were born in the step.

    Forward's blocks that outlive their phase were saved for backward: by a layer that is repeated,
    they are what it keeps; by others, activations. A repeated forward's that outlive it are
    activations again, and a rebuilding one's are the inputs it was run for. The rest is temporary.
    """
    starts = [phase.start for phase in phases]
    repeated = {phase.name.partition(" ")[2] for phase in phases if phase.work == "recompute"}
    for block in blocks:
        if block.category != "other" or block.born <= 0:
            continue
        index = bisect_right(starts, block.born)
        end = starts[index] if index < len(starts) else None
        outlives = end is not None and (block.died is None or block.died > end)
        work = block.place.work
        if work in ("forward", "recompute", "rebuild", "loss") and outlives:
            kept = work == "rebuild" or (work == "forward" and block.place.layer in repeated)
            block.category = "kept" if kept else "activations"
        elif work != "data" and block.died is not None:
            block.category = "temporary"
