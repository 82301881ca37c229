"""How much the CPU updates while the rest streams through the device."""

from collections.abc import Callable
from dataclasses import dataclass

PURE_UNLESS = 0.97
"""Both ways at once have to take at most this part of the better one's time: one way alone is
simpler, and a measurement varies by a few per cent."""

DIGITS = 3
"""Of a share: thousandths."""

REFINEMENTS = 3
REPEATS = 2


@dataclass(frozen=True)
class Times:
    """Seconds of one update: as a whole, and until either way was done (0 where it did nothing)."""

    whole: float
    streaming: float
    processor: float


@dataclass(frozen=True)
class Measured:
    """What was measured at the start, in seconds per update of ``parameters`` parameters.

    Attributes:
        parameters: of the sample.
        streaming: all through the device.
        processor: all by the CPU.
        both: at the best share of both found.
        share: part that the CPU gets: 0, 1 or that share, in thousandths, so that it can be written
            into a recipe as it is.
    """

    parameters: int
    streaming: float
    processor: float
    both: float
    share: float


def choose(run: Callable[[float], Times], parameters: int) -> Measured:
    """Find the share of the CPU at which an update takes the least time.

    Both ways use the same host memory and link, so neither is as fast beside the other as alone:
    the share is refined with the rates seen when both run.

    Args:
        run: an update at a share 0..1 of the CPU -> its seconds.
        parameters: that it updates.
    """
    for share in (0.0, 1.0):
        run(share)
    streaming, processor = _best(run, 0.0).whole, _best(run, 1.0).whole
    share = round(streaming / (streaming + processor), DIGITS)
    tried = []
    for _ in range(REFINEMENTS):
        times = _best(run, share)
        tried.append((times.whole, share))
        share = round(_balanced(share, times), DIGITS)
    both, share = min(tried)
    if both > PURE_UNLESS * min(streaming, processor):
        share = float(processor < streaming)
    return Measured(parameters, streaming, processor, both, share)


def _best(run: Callable[[float], Times], share: float) -> Times:
    return min((run(share) for _ in range(REPEATS)), key=lambda times: times.whole)


def _balanced(share: float, times: Times) -> float:
    """The share at which both would be done at once, if both kept their rates."""
    if not times.streaming or not times.processor:
        return share
    fast = share / times.processor
    return fast / (fast + (1 - share) / times.streaming)
