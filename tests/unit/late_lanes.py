"""A device that is as late as it may be: work waits in lanes until somebody waits for it.

What is asked for inside ``Lane.use`` is queued; which lane goes on next is drawn at random. Whoever
forgets to wait reads old values, or overwrites what is still needed.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components.streamed_adamw.lanes import Lane, Lanes, Mark

QUEUED = {"aten::copy_", "aten::fill_", "aten::_foreach_add_", "aten::_fused_adamw_"}
AT_ONCE = {
    "aten::slice", "aten::select", "aten::unbind", "aten::view", "aten::detach", "aten::full",
    "aten::alias",
}  # fmt: skip
"""Views and new memory: nobody else's values are read or written."""


@dataclass(frozen=True)
class Moment:
    """So many entries of a lane."""

    lane: "LateLane"
    entries: int


@dataclass(eq=False)
class LateLane:
    """See ``Lane``."""

    device: "LateDevice"
    queue: list[Callable[[], None] | Moment] = field(default_factory=list)
    done: int = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        with _Queueing(self):
            yield

    def mark(self) -> Mark:
        with self.device.lock:
            return Moment(self, len(self.queue))

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, Moment)
        with self.device.lock:
            self.queue.append(mark)

    def ready(self) -> bool:
        """Whether the next entry can be done."""
        if self.done == len(self.queue):
            return False
        entry = self.queue[self.done]
        return not isinstance(entry, Moment) or entry.lane.done >= entry.entries

    def advance(self) -> None:
        """Do the next entry."""
        entry = self.queue[self.done]
        if not isinstance(entry, Moment):
            entry()
        self.done += 1


class _Queueing(TorchDispatchMode):
    def __init__(self, lane: LateLane) -> None:
        super().__init__()
        self.lane = lane

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.name().split(".")[0]
        if name in AT_ONCE:
            return func(*args, **(kwargs or {}))
        assert name in QUEUED, f"{name} reads or writes at once"
        kept = tuple(list(arg) if isinstance(arg, list) else arg for arg in args)
        with self.lane.device.lock:
            self.lane.queue.append(lambda: func(*kept, **(kwargs or {})))
        return args[0] if name in ("aten::copy_", "aten::fill_") else None


class LateDevice(Lanes):
    """Lanes on the CPU; memory that was let go of is overwritten with NaN."""

    def __init__(self, seed: int) -> None:
        super().__init__(torch.device("cpu"))
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.lanes: list[LateLane] = []
        self.main = self.side()

    def side(self) -> Lane:
        self.lanes.append(LateLane(self))
        # Some lanes lag behind, others run ahead.
        self.speeds = [self.random.choice([0.01, 1.0, 100.0]) for _ in self.lanes]
        return self.lanes[-1]

    def computing(self) -> Lane:
        return self.main

    def staging(self, *shape: int) -> torch.Tensor:
        memory = torch.zeros(shape)
        # Whoever had it before is as late as anybody.
        with self.main.use():
            memory.fill_(float("nan"))
        return memory

    def let_go(self, memory: torch.Tensor) -> None:
        memory.fill_(float("nan"))

    def reach(self, mark: Mark) -> None:
        assert isinstance(mark, Moment)
        with self.lock:
            while mark.lane.done < mark.entries:
                ready = [i for i, lane in enumerate(self.lanes) if lane.ready()]
                assert ready, "every lane waits for another"
                speeds = [self.speeds[i] for i in ready]
                self.lanes[self.random.choices(ready, speeds)[0]].advance()

    def seconds(self, begin: Mark, end: Mark) -> float:
        return 1.0


class Careless(LateDevice):
    """One kind of lane forgets to wait."""

    def __init__(self, seed: int, number: int) -> None:
        """
        Args:
            seed: of the order.
            number: of the lane, in the order in which they are made; 0 computes.
        """
        super().__init__(seed)
        self.number = number
        if number == 0:
            self.main = _Hasty(self.main)

    def side(self) -> Lane:
        lane = super().side()
        return _Hasty(lane) if getattr(self, "number", 0) == len(self.lanes) - 1 > 0 else lane


@dataclass
class _Hasty:
    lane: Lane

    def use(self) -> Any:
        return self.lane.use()

    def mark(self) -> Mark:
        return self.lane.mark()

    def after(self, mark: Mark) -> None:
        """Nobody waits."""
