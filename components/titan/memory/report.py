"""A step's memory in words."""

from components.titan.memory.storages import size
from components.titan.memory.timeline import CATEGORIES, Block, Timeline

LARGEST = 10
"""Live tensors listed at the peak."""


def report(timeline: Timeline) -> str:
    """Peak, where it is, what makes it up, the largest tensors then, and each phase's own peak."""
    peak = timeline.peak
    where = f"{peak.phase}, in {peak.module}" if peak.module else peak.phase
    lines = [
        timeline.title,
        f"measured by {timeline.source}, over {timeline.duration * 1e3:,.0f} ms",
        "",
        f"peak {size(peak.nbytes)} ({peak.nbytes:,} bytes) at {peak.time * 1e3:,.1f} ms: {where}",
    ]
    alive = timeline.alive_at(peak.time)
    for category, meaning in CATEGORIES.items():
        nbytes = sum(block.nbytes for block in alive if block.category == category)
        share = 100 * nbytes / max(peak.nbytes, 1)
        lines.append(f"  {size(nbytes):>12} {share:5.1f}%  {category}: {meaning}")
    lines += ["", f"the {LARGEST} largest of {len(alive)} blocks alive at the peak:"]
    lines += [f"  {size(block.nbytes):>12}  {describe(block)}" for block in alive[:LARGEST]]
    lines += ["", "largest total of each phase:"]
    lines += [f"  {size(nbytes):>12}  {name}" for name, nbytes in phase_peaks(timeline)]
    return "\n".join(lines) + "\n"


def describe(block: Block) -> str:
    """Shape, category and origin of a block."""
    if block.shape is None:
        what = "allocated inside a kernel or library"
    else:
        what = f"{block.dtype} {list(block.shape)}"
    of = f" of {block.name}" if block.name else ""
    if block.born <= 0:
        return f"{what}, {block.category}{of}, there before the step"
    maker = f" by {block.maker}" if block.maker else ""
    return f"{what}, {block.category}{of}, made in {block.place}{maker}"


def phase_peaks(timeline: Timeline) -> list[tuple[str, int]]:
    """Names of phases and their largest totals, in the order of the step.

    A name that comes up again, as in the next micro-batch, stands once, with the largest of all.
    """
    totals = timeline.totals
    found: dict[str, int] = {}
    times = timeline.times
    starts = [phase.start for phase in timeline.phases]
    for index, phase in enumerate(timeline.phases):
        end = starts[index + 1] if index + 1 < len(starts) else float("inf")
        first = int(times.searchsorted(phase.start, side="right")) - 1
        last = int(times.searchsorted(end, side="left"))
        highest = int(totals[max(first, 0) : max(last, first + 1)].max())
        found[phase.name] = max(found.get(phase.name, 0), highest)
    return list(found.items())
