"""What a recomputed region keeps from its first run, so that running it again is exact and cheap.

A model marks three kinds of values and knows nothing else about recomputation:

* ``choice``: a discrete decision (chosen experts, chosen pools). A second top-k may differ where
  scores tie or kernels race, so it is always kept and never made again.
* ``output``: the result of a computation that rebuilds its own graph in backward. Kept, because
  running it again would only serve to throw the result away.
* ``sublayer``: the output of a mixer or a feed-forward part. A pass that only rebuilds the inputs
  of later layers can use it instead of running the part.

Outside a region all three simply compute.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from components.recompute.store import OnDevice, Recall, Store
from components.recompute.surroundings import RandomState

Compute = Callable[[], torch.Tensor]
Mode = Literal["record", "rebuild", "replay"]


@dataclass
class _Entry:
    recall: Recall | None = None
    end: int = 0
    """Place of the entry after it and all that were made within it."""

    random: RandomState | None = None
    """The generators after the first run, if it drew from them."""


class Tape:
    """The kept values of one region and one forward pass, in the order they were made."""

    def __init__(
        self,
        store: Store | None = None,
        keep_sublayers: bool = False,
        random_of: torch.device | None = None,
    ) -> None:
        """
        Args:
            store: where outputs stay; on the device by default. Choices always stay there.
            keep_sublayers: whether ``sublayer`` outputs are kept, for ``rebuilding``.
            random_of: the device whose generator, like the CPU's, moves on as in the first run
                where a value is taken from the tape; None if random numbers do not matter.
        """
        self._store = store or OnDevice()
        self._keep_sublayers = keep_sublayers
        self._random_of = random_of
        self._entries: list[_Entry] = []
        self._cursor = 0
        self._mode: Mode = "record"

    @property
    def recomputing(self) -> bool:
        """Whether the latest run is not the first."""
        return self._mode != "record"

    @property
    def unread(self) -> bool:
        """Whether the latest run is for its graph alone."""
        return self._mode == "replay"

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The region's first run."""
        self._entries.clear()
        with self._running("record"):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A run that builds the graph for backward: choices and outputs come from the tape."""
        with self._running("replay"):
            yield

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """A run for its result alone: sub-layers come from the tape as well, without a graph."""
        with self._running("rebuild"):
            yield

    @contextmanager
    def _running(self, mode: Mode) -> Iterator[None]:
        self._mode, self._cursor = mode, 0
        with _active(self):
            yield

    def choice(self, compute: Compute) -> torch.Tensor:
        """``choice`` within the region."""
        return self._whole(compute, OnDevice())

    def output(self, compute: Compute) -> torch.Tensor:
        """``output`` within the region."""
        return self._whole(compute, self._store)

    def sublayer(self, compute: Compute) -> torch.Tensor:
        """``sublayer`` within the region."""
        if not self._keep_sublayers:
            return compute()
        if self._mode == "record":
            return self._record(compute, self._store)
        if self._mode == "rebuild":
            return self._recall()
        self._next()
        self._cursor += 1
        return compute()

    def _whole(self, compute: Compute, store: Store) -> torch.Tensor:
        """Keep a value that is never computed again, nor anything within it."""
        if self.recomputing:
            return self._recall()
        with _active(None):
            return self._record(compute, store)

    def _record(self, compute: Compute, store: Store) -> torch.Tensor:
        entry = _Entry()
        self._entries.append(entry)
        before = None if self._random_of is None else RandomState.now(self._random_of)
        value = compute()
        if before is not None and before.has_moved():
            entry.random = RandomState.now(before.device)
        entry.recall, entry.end = store.hold(value.detach()), len(self._entries)
        return value

    def _recall(self) -> torch.Tensor:
        entry = self._next()
        assert entry.recall is not None
        self._cursor = entry.end
        if entry.random is not None:
            entry.random.restore()
        # An alias: autograd marks the tensor that a function returns, not the kept one.
        return entry.recall().detach()

    def _next(self) -> _Entry:
        if self._cursor >= len(self._entries):
            raise RuntimeError(
                "a recomputed layer asks for more kept values than its first run kept "
                f"({len(self._entries)}): it takes another path than in forward. Switch off what "
                "makes the layer depend on anything but its inputs, or components.layer_recompute"
            )
        return self._entries[self._cursor]


_LOCAL = threading.local()


def _stack() -> list[Tape | None]:
    if not hasattr(_LOCAL, "stack"):
        _LOCAL.stack = []
    return _LOCAL.stack


def _tape() -> Tape | None:
    stack = _stack()
    return stack[-1] if stack else None


@contextmanager
def _active(tape: Tape | None) -> Iterator[None]:
    stack = _stack()
    stack.append(tape)
    try:
        yield
    finally:
        stack.pop()


def recomputing() -> bool:
    """Whether this is a second or third run of a region."""
    tape = _tape()
    return tape is not None and tape.recomputing


def unread() -> bool:
    """Whether a region runs again for its graph alone, and nobody reads what it returns."""
    tape = _tape()
    return tape is not None and tape.unread


@torch.no_grad()
def choice(compute: Compute) -> torch.Tensor:
    """Make a discrete decision once; a region that runs again gets the first run's.

    Args:
        compute: makes it; runs without a graph.
    """
    tape = _tape()
    return compute() if tape is None else tape.choice(compute)


def output(compute: Compute) -> torch.Tensor:
    """Run a computation that rebuilds its own graph in backward once per forward pass.

    Call it inside the ``forward`` of an autograd function: what it returns has no graph.

    Args:
        compute: runs it without a graph.
    """
    tape = _tape()
    return compute() if tape is None else tape.output(compute)


def sublayer(compute: Compute) -> torch.Tensor:
    """Run a mixer or a feed-forward part, unless a pass needs no more than its kept output.

    Args:
        compute: runs it.
    """
    tape = _tape()
    return compute() if tape is None else tape.sublayer(compute)
