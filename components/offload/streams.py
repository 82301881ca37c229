"""Copies between the device and the host: in line, or beside the computation.

``record_stream`` is not used: it makes the allocator guess when memory is free again. Events say
so exactly, and whoever holds memory that a copy uses lets go of it only after waiting for its event
on the stream that will use the memory next.
"""

from typing import Protocol

import torch

Mark = object
"""A moment on a stream: a copy that has been asked for is done."""


class Lanes(Protocol):
    """How copies are made.

    Attributes:
        beside: copies run beside the computation, so they pay when asked for early, and their
            source and target have to be kept until ``wait`` or ``done``.
    """

    beside: bool

    def offload(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """Copy bytes (n,) on the device, as computed so far, to the host."""
        ...

    def restore(self, source: torch.Tensor, after: Mark) -> tuple[torch.Tensor, Mark]:
        """Copy bytes (n,) on the host, complete at ``after``, into new memory on the device."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is computed from now on sees the copy done."""
        ...

    def synchronise(self) -> None:
        """Return when no copy is under way."""
        ...


class InLine:
    """Copies are steps of the computation like any other."""

    beside = False

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: "cuda" with an index, or "cpu".
        """
        self._device = device

    def offload(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """See ``Lanes.offload``."""
        target.copy_(source, non_blocking=True)
        return None

    def restore(self, source: torch.Tensor, after: Mark) -> tuple[torch.Tensor, Mark]:
        """See ``Lanes.restore``."""
        target = torch.empty_like(source, device=self._device)
        target.copy_(source, non_blocking=True)
        return target, None

    def wait(self, mark: Mark) -> None:
        """See ``Lanes.wait``: nothing to wait for."""

    def synchronise(self) -> None:
        """See ``Lanes.synchronise``."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class BesideOnCpu(InLine):
    """The bookkeeping of ``SideStreams`` on a device that has no streams."""

    beside = True


class SideStreams:
    """A CUDA stream for each direction."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: "cuda" with an index.
        """
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def offload(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """See ``Lanes.offload``."""
        # Asked for now, and before entering the side stream, which would be the answer there.
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        # The place may have been another's, and that one still on its way back to the device.
        self._out.wait_stream(self._back)
        with torch.cuda.stream(self._out):
            self._delay(self._out)
            target.copy_(source, non_blocking=True)
        return self._out.record_event()

    def restore(self, source: torch.Tensor, after: Mark) -> tuple[torch.Tensor, Mark]:
        """See ``Lanes.restore``."""
        computing = torch.cuda.current_stream(self._device)
        target = torch.empty_like(source, device=self._device)
        # The block may be another's whose last use has been asked for but has not happened yet.
        self._back.wait_stream(computing)
        assert isinstance(after, torch.cuda.Event)
        self._back.wait_event(after)
        with torch.cuda.stream(self._back):
            self._delay(self._back)
            target.copy_(source, non_blocking=True)
        return target, self._back.record_event()

    def wait(self, mark: Mark) -> None:
        """See ``Lanes.wait``: the device waits, the host does not."""
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def synchronise(self) -> None:
        """See ``Lanes.synchronise``."""
        torch.cuda.synchronize(self._device)

    def _delay(self, stream: torch.cuda.Stream) -> None:
        """Called on a side stream before each copy; tests make it slow here."""


def lanes_for(device: torch.device, beside: bool) -> Lanes:
    """The way to copy on a device; on the CPU ``beside`` changes the bookkeeping alone."""
    if not beside:
        return InLine(device)
    return SideStreams(device) if device.type == "cuda" else BesideOnCpu(device)
