"""How long a rank scores, how long it would have without others, and what it receives for that."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Span = tuple[torch.cuda.Event, torch.cuda.Event] | float
"""Two events on the stream that computes, or seconds."""


class ShareMeter:
    """Adds up calls since ``reset``. On a GPU nothing waits before ``seconds_saved`` is asked for.

    Attributes:
        nbytes: received from other ranks.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin new sums."""
        self.nbytes = 0
        self._mine = self._all = 0
        self._calls: list[Span] = []
        self._scoring: list[Span] = []
        self._device = torch.device("cpu")

    def received(self, nbytes: int) -> None:
        """``nbytes`` come from other ranks."""
        self.nbytes += nbytes

    def pairs(self, mine: int, together: int) -> None:
        """Of ``together`` pairs of query and pool this rank has scored ``mine``."""
        self._mine += mine
        self._all += together

    @contextmanager
    def call(self, device: torch.device) -> Iterator[None]:
        """A whole call, exchange included."""
        self._device = device
        with self._timed(self._calls):
            yield

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """One block of this rank."""
        with self._timed(self._scoring):
            yield

    @property
    def seconds_saved(self) -> float:
        """What scoring all pairs at this rank's speed would have taken longer than the calls.

        Zero where this rank scored nothing and so knows no speed.
        """
        if not self._mine:
            return 0.0
        alone = sum(map(_seconds, self._scoring)) * self._all / self._mine
        return alone - sum(map(_seconds, self._calls))

    @contextmanager
    def _timed(self, spans: list[Span]) -> Iterator[None]:
        if self._device.type != "cuda":
            begin = time.perf_counter()
            yield
            spans.append(time.perf_counter() - begin)
            return
        events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        events[0].record()
        yield
        events[1].record()
        spans.append((events[0], events[1]))


def _seconds(span: Span) -> float:
    if isinstance(span, float):
        return span
    span[1].synchronize()
    return span[0].elapsed_time(span[1]) / 1e3
