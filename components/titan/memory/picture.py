"""A timeline as a PNG."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from components.titan.memory.storages import size
from components.titan.memory.timeline import CATEGORIES, Timeline

COLORS = {
    "parameters": "#4c72b0",
    "gradients": "#55a868",
    "optimizer state": "#8172b3",
    "kept": "#dd8452",
    "activations": "#c44e52",
    "temporary": "#ccb974",
    "other": "#8c8c8c",
}

WORK_COLORS = {
    "data": "#d9d9d9",
    "forward": "#9ecae1",
    "recompute": "#fdae6b",
    "rebuild": "#fee391",
    "loss": "#bcbddc",
    "backward": "#fc9272",
    "optimizer": "#a1d99b",
}

POINTS = 2000
"""Events drawn; of more, each stretch's largest."""

NARROW = 0.006
"""Share of the step's time below which a phase gets no label of its own."""


def write_picture(timeline: Timeline, file: Path) -> None:
    """Draw bytes by category over time, the phases above them, and the peak."""
    figure = Figure(figsize=(16, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 6))
    _phases(timeline, strip)
    _areas(timeline, axes)
    peak = timeline.peak
    where = f"{peak.phase}, in {peak.module}" if peak.module else peak.phase
    strip.set_title(f"{timeline.title}\npeak {size(peak.nbytes)}: {where}", fontsize=11)
    figure.savefig(file)


def unit_of(nbytes: int) -> tuple[str, int]:
    """The unit in which a total reads best, and its bytes."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next(((name, scale) for name, scale in units if nbytes >= scale), ("B", 1))


def _areas(timeline: Timeline, axes: Axes) -> None:
    name, scale = unit_of(timeline.peak.nbytes)
    picked = timeline.thinned(POINTS)
    times = [*(timeline.times[picked] * 1e3), timeline.duration * 1e3]
    floor = [0.0] * len(times)
    for category, curve in zip(CATEGORIES, timeline.curves[:, picked] / scale, strict=True):
        top = [a + b for a, b in zip(floor, [*curve, curve[-1]], strict=True)]
        color = COLORS[category]
        axes.fill_between(times, floor, top, step="post", color=color, lw=0, label=category)
        floor = top
    peak = timeline.peak
    axes.plot([peak.time * 1e3], [peak.nbytes / scale], "k.", markersize=6)
    for phase in timeline.phases[1:]:
        axes.axvline(phase.start * 1e3, color="black", lw=0.3, alpha=0.25)
    axes.set(xlabel="milliseconds since the step began", ylabel=name, xlim=(0, times[-1]))
    axes.set_ylim(0, peak.nbytes / scale * 1.04)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", fontsize=8, framealpha=0.8)


def _phases(timeline: Timeline, axes: Axes) -> None:
    ends = [phase.start for phase in timeline.phases[1:]] + [timeline.duration]
    for phase, end in zip(timeline.phases, ends, strict=True):
        start, width = phase.start * 1e3, (end - phase.start) * 1e3
        axes.axvspan(start, start + width, color=WORK_COLORS[phase.work], lw=0)
        if width > NARROW * timeline.duration * 1e3:
            label = phase.name.removeprefix(f"{phase.work} ").replace("layers.", "L")
            middle = start + width / 2
            axes.text(middle, 0.5, label, rotation=90, ha="center", va="center", fontsize=7)
    axes.set(ylim=(0, 1), yticks=[])
    axes.tick_params(labelbottom=False, bottom=False)
    drawn = {phase.work for phase in timeline.phases}
    patches = [Patch(color=c, label=work) for work, c in WORK_COLORS.items() if work in drawn]
    axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
