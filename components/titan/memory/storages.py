"""See every tensor that torch makes, without holding any of them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

Made = Callable[[torch.Tensor, str], None]
"""Gets a plain tensor, and the operation that made it."""

Used = Callable[[torch.Tensor], None]
"""Gets a plain tensor."""

Copied = Callable[[torch.Tensor, torch.Tensor], None]
"""Gets the target and the source of a copy in place, both plain tensors."""


class TensorWatch(TorchDispatchMode):
    """While it is on: ``made`` is called with every result that is no view of an input, ``used``
    with every input, ``copied`` after every copy from one tensor into another.

    What a kernel allocates for itself, and what compiled code keeps inside, is not seen.
    """

    # Compiled kernels (flex attention) stay compiled, and run as one operation.
    supports_higher_order_operators = True

    def __init__(self, made: Made, used: Used | None = None, copied: Copied | None = None) -> None:
        super().__init__()
        self._made = made
        self._used = used
        self._copied = copied

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            # DTensor first: its operations on the local tensors come back here.
            return NotImplemented
        kwargs = kwargs or {}
        given: set[int] = set()
        for tensor in plain_tensors((args, kwargs)):
            given.add(storage_key(tensor))
            if self._used is not None:
                self._used(tensor)
        result = func(*args, **kwargs)
        for tensor in plain_tensors(result):
            if storage_key(tensor) not in given:
                self._made(tensor, str(func))
        if self._copied is not None and func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        return result


def plain_tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors with memory of their own in a nest of containers; DTensors give their local one."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            yield from unwrapped(value)


def unwrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor consists of; none on the meta device or without memory."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            # A DTensor lists its mesh as well.
            if isinstance(inner, torch.Tensor):
                yield from unwrapped(inner)
    elif tensor.layout == torch.strided and _is_real(tensor):
        yield tensor


def _is_real(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind it: compilers leave fake tensors behind, which say "cuda"
    themselves, and the batched ones of vmap, which have no storage to show."""
    try:
        return tensor.untyped_storage().device.type != "meta"
    except NotImplementedError:
        return False


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a plain tensor's memory, as long as it lives."""
    return tensor.untyped_storage()._cdata


def short_dtype(dtype: torch.dtype) -> str:
    """ "float32" instead of "torch.float32"."""
    return str(dtype).removeprefix("torch.")


def size(nbytes: int) -> str:
    """Bytes for people: "1.5 MiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
