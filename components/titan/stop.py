"""Stop a job at a step that all ranks agree on, when one of them is asked to stop."""

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopRequest:
    """Turns SIGTERM and SIGINT into "stop after this step, everywhere".

    Signals reach ranks at different moments, so the ranks compare notes once per step over a gloo
    group: a collective on the host, which never waits for the device.
    """

    def __init__(self, host_group: dist.ProcessGroup | None) -> None:
        """Nothing is caught before ``install``.

        Args:
            host_group: gloo group over all ranks; None for one rank.
        """
        self.signal: int | None = None
        self.interrupts = 0
        self._group = host_group
        self._previous: dict[int, object] = {}

    def install(self) -> None:
        """Catch the signals. Call on every rank."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)

    def uninstall(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. A collective call, once per step."""
        asked = torch.tensor([self.signal or 0], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        number = int(asked.item())
        if number:
            self.signal = number
        # Not `self.signal`: one that came during the vote is known to this rank alone, until the
        # next.
        return number != 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Launchers and schedulers repeat SIGTERM, and a terminal's Ctrl-C comes with one. Only a
        # second Ctrl-C is a person who wants out without waiting for the checkpoint.
        if number == signal.SIGINT and self.interrupts:
            raise KeyboardInterrupt
        self.interrupts += number == signal.SIGINT
        self.signal = self.signal or number
