"""Activations that outlive their layer, found and named while training (``debug.leak_guard``)."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from components.titan.memory.holders import (
    Holder,
    held_by_modules,
    holds,
    other_owners,
    tensors_in,
)
from components.titan.memory.places import Place, PlaceTracker, in_backward
from components.titan.memory.storages import (
    TensorWatch,
    plain_tensors,
    short_dtype,
    size,
    storage_key,
    unwrapped,
)
from kernels.tables import being_made

if TYPE_CHECKING:
    from components.titan.trainer import RecipeTrainer

SHOWN = 5
"""Leaks described in one error; further ones are counted."""

NUMBER_BYTES = 8
"""Tensors up to this size are numbers, which metrics may keep; with a graph they are leaks."""


class ActivationLeak(RuntimeError):
    """A layer's activation is alive when nothing may need it any more."""


@dataclass
class _Made:
    """A tensor that a layer made; its memory is watched, not held."""

    memory: StorageWeakRef
    key: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    by: str
    place: Place
    again: bool
    """Made by a module's forward that ran inside backward."""

    def alive(self) -> bool:
        if self.memory.expired():
            return False
        # FSDP gives memory back by shrinking it to nothing.
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        return storage is not None and storage.nbytes() > 0

    def __str__(self) -> str:
        return (
            f"{self.dtype} {list(self.shape)}, {size(self.nbytes)}, made by {self.by} "
            f"in the {self.place}"
        )


class LeakGuard:
    """Raises ``ActivationLeak`` when a layer's activation lives too long.

    After a layer's backward nothing of its repeated forward may be alive; after a micro-batch
    nothing that a layer made, in forward or in backward. Kept on purpose are parameters, buffers,
    gradients and FSDP's gathered parameters, and, until the end of the micro-batch, layers'
    outputs and what the first forward keeps for the repetition.

    Single numbers without a graph may be kept, for metrics. In the first micro-batch only what a
    module holds with its graph counts: the rest may be a cache, and is a leak if a later one
    makes it again; but for ``kernels.tables``, which other documents need anew. What is made in
    backward outside of a module's forward is a leak only if a module holds it. The inside of
    compiled kernels is not seen.
    """

    def __init__(self, trainer: "RecipeTrainer") -> None:
        self._parts: list[nn.Module] = trainer.model_parts
        self._tracker = PlaceTracker(self._parts)
        self._tracker.on_enter.append(self._entered)
        self._tracker.on_exit.append(self._left)
        self._watch = TensorWatch(self._made_now)
        self._made: dict[int, _Made] = {}
        self._handed_on: set[int] = set()
        self._first = True

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a whole step; the guard looks at micro-batches."""
        yield

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """Around forward and backward of one accumulation pass.

        Raises:
            ActivationLeak: at once, in backward, or at the end.
        """
        self._made.clear()
        self._handed_on.clear()
        self._tracker.attach()
        try:
            with self._watch:
                self._tracker.at("data")
                yield
        finally:
            self._tracker.detach()
        self._judge(list(self._made.values()), "the micro-batch")
        self._first = False

    def _made_now(self, tensor: torch.Tensor, operation: str) -> None:
        place = self._tracker.here
        if not place.layer or being_made():
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._made.get(key)
        if known is not None and not known.memory.expired():
            return
        self._made[key] = _Made(
            StorageWeakRef(storage), key, tuple(tensor.shape), short_dtype(tensor.dtype),
            storage.nbytes(), operation, place, self._tracker.repeating,
        )  # fmt: skip

    def _entered(self, module: nn.Module, name: str, inputs: Any, again: bool) -> None:
        if not again or name != Place("recompute", name).layer:
            return
        given = {storage_key(tensor) for tensor in plain_tensors(inputs)} | self._handed_on
        made = [m for m in self._made.values() if m.again and m.key not in given]
        self._judge(made, "its layer's backward")

    def _left(self, name: str, output: Any) -> None:
        if in_backward() and name == Place("recompute", name).layer:
            self._handed_on |= {storage_key(tensor) for tensor in plain_tensors(output)}

    def _judge(self, candidates: list[_Made], after: str) -> None:
        alive = [made for made in candidates if made.alive()]
        if not alive:
            return
        holders = held_by_modules(self._parts)
        allowed = self._kept_on_purpose()
        leaks = [(m, self._holder(m, holders)) for m in alive if m.key not in allowed]
        leaks = [(m, holder) for m, holder in leaks if self._is_leak(m, holder)]
        if leaks:
            graphs = [str(holder) for holder in holders if holder.tensor.grad_fn is not None]
            raise ActivationLeak(_report(leaks, after, graphs))

    def _holder(self, made: _Made, holders: list[Holder]) -> Holder | None:
        return next((holder for holder in holders if holds(holder.tensor, made.key)), None)

    def _is_leak(self, made: _Made, holder: Holder | None) -> bool:
        if holder is not None and holder.tensor.grad_fn is not None:
            return True
        a_number = made.nbytes <= NUMBER_BYTES
        in_flight = made.place.work == "backward" and not made.again and holder is None
        return not (self._first or a_number or in_flight)

    def _kept_on_purpose(self) -> set[int]:
        kept: list[Any] = []
        for part in self._parts:
            for parameter in part.parameters():
                kept += [parameter, parameter.grad]
            kept += [buffer for buffer in part.buffers() if buffer.grad_fn is None]
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    state = module._get_fsdp_state()
                    kept += [tensor for _, tensor in tensors_in(state, "", 6, set())]
        plain = [p for tensor in kept if tensor is not None for p in unwrapped(tensor)]
        return {storage_key(tensor) for tensor in plain}


def _report(leaks: list[tuple[_Made, Holder | None]], after: str, graphs: list[str]) -> str:
    leaks = sorted(leaks, key=lambda leak: -leak[0].nbytes)
    total = sum(made.nbytes for made, _ in leaks)
    layers = sorted({made.place.layer for made, _ in leaks})
    count = f"{len(leaks)} tensor{'s' if len(leaks) > 1 else ''} ({size(total)})"
    lines = [f"debug.leak_guard: {count} of {', '.join(layers)} alive after {after}:"]
    for made, holder in leaks[:SHOWN]:
        lines.append(f"  {made}; held by {holder or _elsewhere(made, graphs)}")
    if len(leaks) > SHOWN:
        lines.append(f"  and {len(leaks) - SHOWN} more")
    lines.append(
        "Keep no activation beyond forward: drop what holds it, or store a single detached number; "
        "debug.leak_guard=false trains on regardless"
    )
    return "\n".join(lines)


def _elsewhere(made: _Made, graphs: list[str]) -> str:
    owners = other_owners(made.key)
    gc.collect()
    if made.memory.expired():
        return f"a reference cycle, until Python collects garbage ({', '.join(owners)})"
    if owners:
        return ", ".join(owners)
    if graphs:
        return f"the autograd graph, which may be kept by {', '.join(graphs[:SHOWN])}"
    return "the autograd graph alone: saved for a backward that did not run"
