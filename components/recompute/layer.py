"""A decoder layer that keeps its input and runs its forward again in backward."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils.checkpoint import checkpoint

from components.recompute.segment import Member, Rebuild, Segment
from components.recompute.store import OnDevice, Store
from components.recompute.surroundings import Surroundings
from components.recompute.tape import Tape
from components.titan.counting import counting_nothing


class RecomputedLayer(ActivationWrapper):
    """Wraps one layer; names in state dicts stay those of the layer.

    Attributes:
        store: where its input, and what its tape keeps, stay until backward; on the device unless
            something sets it.
    """

    def __init__(
        self,
        layer: nn.Module,
        segment: Segment | None = None,
        place: int = 0,
        *,
        keep_sublayers: bool = False,
        preserve_rng_state: bool = True,
    ) -> None:
        """
        Args:
            layer: takes the hidden state first and returns the next one.
            segment: shared with the layers around it; None for a layer on its own.
            place: in the segment, from 0.
            keep_sublayers: see ``Tape``.
            preserve_rng_state: draw the same random numbers every time.
        """
        super().__init__(layer)
        self.store: Store = OnDevice()
        self._segment = segment or Segment(1)
        self._place = place
        self._keep_sublayers = keep_sublayers
        self._preserve_rng_state = preserve_rng_state

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's forward.

        Args:
            hidden: floating point; what is kept.
            args, kwargs: shared by all layers, such as positions; held as they are.
        """
        layer = self._checkpoint_wrapped_module
        if not torch.is_grad_enabled():
            return layer(hidden, *args, **kwargs)
        device = hidden.device
        tape = Tape(self.store, self._keep_sublayers, device if self._preserve_rng_state else None)

        def run(hidden: torch.Tensor) -> torch.Tensor:
            return layer(hidden, *args, **kwargs)

        replaying = _Reusable(lambda: self._again(tape.replaying()))
        is_last = self._place + 1 == self._segment.size
        rebuild = None if is_last else self._rebuilding(run, tape, device)
        member = Member(self, rebuild, hidden.dtype)
        with self._segment.running(self._place, member, self.store):
            # Stopping early would leave collectives and hooks of modules half done.
            return checkpoint(
                run,
                hidden,
                use_reentrant=False,
                early_stop=False,
                preserve_rng_state=self._preserve_rng_state,
                context_fn=lambda: (tape.recording(), replaying),
            )

    def _rebuilding(self, run: Rebuild, tape: Tape, device: torch.device) -> Rebuild:
        surroundings = Surroundings(device, self._preserve_rng_state)

        def rebuild(hidden: torch.Tensor) -> torch.Tensor:
            with surroundings.again(), self._again(tape.rebuilding()):
                return run(hidden)

        return rebuild

    @contextmanager
    def _again(self, mode: AbstractContextManager[None]) -> Iterator[None]:
        with mode, counting_nothing(self._checkpoint_wrapped_module):
            yield


class _Reusable:
    """A context manager that is made anew each time: torch enters the same one again if backward
    passes a graph twice."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._current: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._current = self._make()
        self._current.__enter__()

    def __exit__(self, *error: Any) -> None:
        assert self._current is not None
        current, self._current = self._current, None
        current.__exit__(*error)
