"""Consecutive layers of which only the first one's input is kept between forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from components.recompute.store import Recall, Store

Rebuild = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Member:
    """One layer in one forward pass.

    Attributes:
        layer: what FSDP shards as one unit.
        rebuild: its input -> its output, without a graph, as in the first run. None for the last
            of a segment, and once backward has come past it: what it kept is needed no more.
        dtype: of its input, which FSDP may have cast.
    """

    layer: nn.Module
    rebuild: Rebuild | None
    dtype: torch.dtype


class Segment:
    """What the layers of a segment share. Layers of one segment must be called in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pass: Pass | None = None

    @contextmanager
    def running(self, place: int, member: Member, store: Store) -> Iterator[None]:
        """Run the layer at ``place``, with the saving of its input in the segment's hands.

        Args:
            place: 0 for the first layer.
            member: the layer.
            store: where the first layer's input goes.

        Raises:
            RuntimeError: the layer before it has not just run.
        """
        current = Pass(store) if place == 0 else self._pass
        self._pass = None
        if current is None or len(current.members) != place:
            raise RuntimeError(
                f"layer {place} of a segment of {self.size} ran without the one before it; "
                "with components.layer_recompute.every above 1 the model must run its layers in "
                "order, each once"
            )
        current.members.append(member)
        with current.keeping(place):
            yield
        # Not after an error: the pass would keep tensors until the next one.
        if place + 1 < self.size:
            self._pass = current


class Pass:
    """One forward pass through a segment, and what backward needs of it.

    Attributes:
        members: the layers that have run.
    """

    def __init__(self, store: Store) -> None:
        self.members: list[Member] = []
        self._store = store
        self._first: Recall | None = None
        self._inputs: dict[int, torch.Tensor] = {}

    def keeping(self, place: int) -> saved_tensors_hooks:
        """While this is active, the one tensor that is saved is the input of a layer."""

        def pack(hidden: torch.Tensor) -> int:
            if place == 0:
                self._first = self._store.boundary(hidden)
            return place

        return saved_tensors_hooks(pack, self._take)

    def _take(self, place: int) -> torch.Tensor:
        """The input of a layer, which is then no longer kept here."""
        if place not in self._inputs:
            self._rebuild(place)
        for member in self.members[place:]:
            member.rebuild = None
        return self._inputs.pop(place)

    def _rebuild(self, last: int) -> None:
        """Run the layers before ``last`` again, for their inputs."""
        assert self._first is not None
        self._inputs = {0: self._first()}
        with torch.no_grad(), _Gatherer([m.layer for m in self.members[:last]]) as gatherer:
            for place, member in enumerate(self.members[:last]):
                if member.rebuild is None:
                    raise RuntimeError(
                        "a second backward through one graph (retain_graph=True) needs "
                        "components.layer_recompute.every=1"
                    )
                with gatherer.gathered(place):
                    out = member.rebuild(self._inputs[place])
                self._inputs[place + 1] = out.to(self.members[place + 1].dtype)


class _Gatherer:
    """Gathers sharded layers one ahead of their use, and frees them after it.

    FSDP's own hooks would take a run in backward for a part of the forward order, and fetch layers
    that are not needed any more. The last layer stays: its backward is next but one.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self._pending: dict[int, UnshardHandle] = {}

    def __enter__(self) -> "_Gatherer":
        return self

    def __exit__(self, *error: object) -> None:
        for place, handle in self._pending.items():
            handle.wait()
            layer = self._layers[place]
            assert isinstance(layer, FSDPModule)
            layer.reshard()
        self._pending.clear()

    @contextmanager
    def gathered(self, place: int) -> Iterator[None]:
        layer = self._layers[place]
        if not isinstance(layer, FSDPModule):
            yield
            return
        before = list(layer.parameters())
        self._fetch(place)
        self._pending.pop(place).wait()
        # What FSDP leaves gathered all the time is not ours to free.
        ours = any(a is not b for a, b in zip(before, layer.parameters(), strict=True))
        self._fetch(place + 1)
        try:
            yield
        finally:
            if ours and place + 1 < len(self._layers):
                layer.reshard()

    def _fetch(self, place: int) -> None:
        if place < len(self._layers) and place not in self._pending:
            layer = self._layers[place]
            assert isinstance(layer, FSDPModule)
            handle = layer.unshard(async_op=True)
            assert handle is not None
            self._pending[place] = handle
