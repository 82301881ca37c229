"""Queues of work on a device, ordered by marks; on the CPU everything happens at once.

``record_stream`` is not used: whoever lets go of memory has waited for the last mark of its use.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

Mark = object
"""A moment in a lane: all that was asked of it before is done. An event, or on the CPU when that
was, in seconds."""


class Lane(Protocol):
    """Work that happens in the order in which it was asked for."""

    def use(self) -> AbstractContextManager[object]:
        """What is asked for inside goes into this lane; of the calling thread alone."""
        ...

    def mark(self) -> Mark:
        """The moment when all that was asked for so far is done."""
        ...

    def after(self, mark: Mark) -> None:
        """What is asked for from now on waits for a moment; the host does not."""
        ...


class AtOnce:
    """Work is done when asked for."""

    def use(self) -> AbstractContextManager[object]:
        """See ``Lane.use``."""
        return nullcontext()

    def mark(self) -> Mark:
        """See ``Lane.mark``."""
        return time.perf_counter()

    def after(self, mark: Mark) -> None:
        """See ``Lane.after``: it is past."""


class StreamLane:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def use(self) -> AbstractContextManager[object]:
        """See ``Lane.use``."""
        return torch.cuda.stream(self.stream)

    def mark(self) -> Mark:
        """See ``Lane.mark``."""
        return self.stream.record_event(torch.cuda.Event(enable_timing=True))

    def after(self, mark: Mark) -> None:
        """See ``Lane.after``."""
        assert isinstance(mark, torch.cuda.Event)
        self.stream.wait_event(mark)


class Lanes:
    """Lanes and staging memory of one device. Tests make lanes slow and spoil memory here."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: "cuda" with an index, or "cpu".
        """
        self.device = device

    def side(self) -> Lane:
        """A new lane beside the computation."""
        if self.device.type != "cuda":
            return AtOnce()
        return StreamLane(torch.cuda.Stream(self.device))

    def computing(self) -> Lane:
        """The lane that the calling thread computes in at the moment."""
        if self.device.type != "cuda":
            return AtOnce()
        return StreamLane(torch.cuda.current_stream(self.device))

    def staging(self, *shape: int) -> torch.Tensor:
        """New device memory, fp32, for the lane in use; others have to wait for it."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def let_go(self, memory: torch.Tensor) -> None:
        """Called in the lane of the last use when the content is not needed any more."""

    def reach(self, mark: Mark) -> None:
        """Return when a moment is past."""
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Time between two moments that are past."""
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return begin.elapsed_time(end) / 1e3
        assert isinstance(begin, float) and isinstance(end, float)
        return end - begin
