"""One tensor that was saved for backward: whether it may leave the device, and how it comes back.

What moves is a whole storage, as bytes. Tensors that are different views of one whole storage share
the copy; a view of a part is left alone, because the storage would stay anyway.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from components.offload.arena import Place
from components.offload.streams import Mark

Reason = Literal[
    "parameter", "tensor subclass", "other device", "not floating point", "without gradient",
    "part of a storage", "small", "not chosen", "no room",
]  # fmt: skip
"""Why a tensor stays on the device. The last two: it could have gone."""


def why_not(tensor: torch.Tensor, device: torch.device, smallest: int) -> Reason | None:
    """Why offloading a tensor would not free its memory, or would not be worth a copy.

    Args:
        tensor: about to be saved.
        device: what is offloaded from.
        smallest: bytes below which a copy is not worth it.
    """
    if isinstance(tensor, nn.Parameter):
        return "parameter"
    if type(tensor) is not torch.Tensor:
        return "tensor subclass"
    if tensor.device.type != device.type:
        return "other device"
    if not tensor.is_floating_point():
        return "not floating point"
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes > tensor.numel() * tensor.itemsize:
        return "part of a storage"
    return "small" if nbytes < smallest else None


def storage_key(tensor: torch.Tensor) -> tuple[int, int, StorageWeakRef]:
    """What identifies a storage and its present content, and the reference that keeps the identity
    from being given to another storage."""
    reference = StorageWeakRef(tensor.untyped_storage())
    return reference.cdata, tensor._version, reference


@dataclass(eq=False)
class Waiting:
    """A tensor on the device whose copy to the host may not be done.

    Attributes:
        tensor: shares memory and version with what was saved; None once it was let go.
        version: of the tensor when the copy was asked for.
        copied: when the copy is done.
        wanted: whether anybody can still ask for the copy.
    """

    tensor: torch.Tensor | None
    version: int
    copied: Mark
    wanted: bool = True


@dataclass(eq=False)
class Stored:
    """One storage on the host.

    Attributes:
        place: where.
        copied: when it is complete there.
        waiting: its original, while the copy may be under way; None where copies are in line.
        ahead: its bytes on the device, asked for before they are needed, and when they are there.
        recalls: how often it was asked for.
        forget: called when nothing refers to it any more.
    """

    place: Place
    copied: Mark
    waiting: Waiting | None
    forget: Callable[["Stored"], None]
    ahead: tuple[torch.Tensor, Mark] | None = None
    recalls: int = 0

    def __del__(self) -> None:
        self.forget(self)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor: uint8 (n,), sharing memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True)
class Form:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """The form of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """A tensor of this form over bytes (n,), sharing memory, without a graph."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
