"""Every tensor of a step from birth to death, by watching torch make them and weak references."""

import gc
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from components.titan.memory.places import Place
from components.titan.memory.storages import (
    TensorWatch,
    plain_tensors,
    short_dtype,
    storage_key,
    unwrapped,
)
from components.titan.memory.timeline import Block, Category

_STRENGTH: tuple[Category, ...] = (
    "other", "temporary", "activations", "kept", "gradients", "optimizer state", "parameters",
)  # fmt: skip


@dataclass
class Entry:
    """A block and where it lies.

    Attributes:
        block: size, times, name.
        address: of its first byte; the allocator's events name it.
        memory: weak reference to the storage.
    """

    block: Block
    address: int
    memory: weakref.ref


class Ledger:
    """Keeps the books of one device's tensors while it is open.

    Sizes are those of the tensors' storages; what a kernel allocates for itself is not seen.

    Attributes:
        entries: all entries so far, in order of birth.
    """

    def __init__(
        self,
        device: str,
        clock: Callable[[], float],
        here: Callable[[], Place],
        host: Collection[int] = (),
    ) -> None:
        """
        Args:
            device: type of the device whose memory is counted: "cpu" or "cuda".
            clock: seconds since the step began.
            here: the place at work.
            host: keys of storages that stand for another memory than the device's even where both
                are the CPU's: they are left out, and what is copied from them was kept there.
        """
        self.entries: list[Entry] = []
        self._device = device
        self._clock = clock
        self._here = here
        self._host = frozenset(host)
        self._alive: dict[int, Entry] = {}
        self._watch = TensorWatch(self._made, self._used, self._copied)
        self._watching = ExitStack()

    def open(self) -> None:
        """Take stock of the tensors that Python knows, and watch from now on."""
        for value in gc.get_objects():
            if issubclass(type(value), torch.Tensor):
                for tensor in unwrapped(value):
                    self._used(tensor)
        self._follow_resizing()
        self._watching.enter_context(self._watch)

    def close(self) -> None:
        """Stop watching, if ``open`` came that far. Blocks that are alive stay so."""
        self._watching.close()
        self._alive.clear()

    def mark(self, tensors: Any, category: Category, name: str = "") -> None:
        """Say what tensors are; the stronger word counts.

        Args:
            tensors: one, or a container of them.
            category: what they are.
            name: the parameter that they belong to.
        """
        for tensor in plain_tensors(tensors):
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry is None:
                continue
            ranks = map(_STRENGTH.index, (category, entry.block.category))
            entry.block.category = _STRENGTH[max(ranks)]
            entry.block.name = entry.block.name or name

    def _made(self, tensor: torch.Tensor, operation: str) -> None:
        self._enter(tensor, self._clock(), self._here(), operation)

    def _used(self, tensor: torch.Tensor) -> None:
        # Made before, or where the watch does not see: it counts from the moment it is seen.
        self._enter(tensor, self._clock(), Place("data"), "")

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if any(storage_key(plain) in self._host for plain in unwrapped(source)):
            self.mark(target, "kept")

    def _enter(self, tensor: torch.Tensor, time: float, place: Place, maker: str) -> None:
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive or storage._cdata in self._host or not storage.nbytes():
            return
        block = Block(
            nbytes=storage.nbytes(), born=time, place=place, shape=tuple(tensor.shape),
            dtype=short_dtype(tensor.dtype), maker=maker,
        )  # fmt: skip
        self._add(storage, block)

    def _add(self, storage: torch.UntypedStorage, block: Block) -> None:
        key = storage._cdata

        def died(reference: weakref.ref) -> None:
            self._end(key)

        entry = Entry(block, storage.data_ptr(), weakref.ref(storage, died))
        self.entries.append(entry)
        self._alive[key] = entry

    def _end(self, key: int) -> None:
        entry = self._alive.pop(key, None)
        if entry is not None:
            entry.block.died = self._clock()

    def _follow_resizing(self) -> None:
        """FSDP gives gathered parameters back by shrinking their storage to nothing."""
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            known = self._alive.get(storage._cdata)
            result = original(storage, size)
            if storage.device.type != self._device or (known and known.block.nbytes == size):
                return result
            self._end(storage._cdata)
            if size:
                like = known or self._shrunk(storage)
                self._add(storage, self._again(like, size))
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        # Without it, what it inherits shows again.
        self._watching.callback(delattr, torch.UntypedStorage, "resize_")

    def _shrunk(self, storage: torch.UntypedStorage) -> Entry | None:
        own = (e for e in reversed(self.entries) if e.memory() is storage)
        return next(own, None)

    def _again(self, like: Entry | None, size: int) -> Block:
        block = Block(nbytes=size, born=self._clock(), place=self._here(), maker="resize_")
        if like is not None:
            old = like.block
            block.shape, block.dtype = old.shape, old.dtype
            block.category, block.name = old.category, old.name
        return block
