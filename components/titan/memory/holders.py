"""Who keeps a tensor alive: a module's attribute, an object behind it, or another Python object."""

import functools
import gc
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from components.titan.memory.places import clean_name
from components.titan.memory.storages import storage_key, unwrapped

DEPTH = 5
"""How many objects and containers away from a module a tensor is looked for."""

# What modules keep for torch itself: parameters and sub-modules are visited on their own, hooks and
# FSDP's state are the framework's.
_FRAMEWORK = ("_parameters", "_modules", "__composable")


@dataclass(frozen=True)
class Holder:
    """What keeps a tensor alive.

    Attributes:
        path: dotted name ("layers.1.moe.router.last"), or a description for others.
        kind: class of the module or object.
        tensor: the tensor that it holds, which may be a view of the memory in question.
    """

    path: str
    kind: str
    tensor: torch.Tensor

    def __str__(self) -> str:
        text = f"{self.path} ({self.kind})"
        node = self.tensor.grad_fn
        return f"{text}, with its graph ({node.name()})" if node is not None else text


def held_by_modules(parts: list[nn.Module]) -> list[Holder]:
    """Every tensor that a module keeps outside its parameters and plain buffers."""
    found = []
    for part in parts:
        for raw, module in part.named_modules():
            name = clean_name(raw) or type(part).__name__
            for path, tensor in _of_module(module, name):
                found.append(Holder(path, type(module).__name__, tensor))
    return found


def _of_module(module: nn.Module, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for key, value in vars(module).items():
        if key == "_buffers":
            # A buffer is kept on purpose, but not with the graph that made it.
            kept = {k: v for k, v in value.items() if v is not None and v.grad_fn is not None}
            yield from ((f"{name}.{k}", tensor) for k, tensor in kept.items())
        elif not key.startswith(_FRAMEWORK) and not (key.startswith("_") and "hooks" in key):
            yield from tensors_in(value, f"{name}.{key}", DEPTH, seen)


def tensors_in(
    value: Any, path: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that can be reached from an object through attributes, containers and closures.

    Args:
        value: where to begin; modules on the way are not entered.
        path: how it is called.
        depth: how many steps to go.
        seen: identities of the objects visited so far; grows.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, _CLOSED):
        return
    seen.add(id(value))
    for name, inner in _inside(value):
        yield from tensors_in(inner, f"{path}{name}", depth - 1, seen)


_CLOSED = (
    nn.Module, type, types.ModuleType, str, bytes, int, float, complex, bool, type(None),
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from ((f".args[{index}]", inner) for index, inner in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", inner) for key, inner in value.keywords.items())
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        for name, cell in cells:
            yield from ((f".{name} (closure)", inner) for inner in _content(cell))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    else:
        slots = [s for cls in type(value).__mro__ for s in _slots(cls)]
        attributes = {s: getattr(value, s) for s in slots if hasattr(value, s)}
        attributes.update(getattr(value, "__dict__", {}))
        yield from ((f".{key}", inner) for key, inner in attributes.items())


def _content(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not filled yet
        return []


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def holds(tensor: torch.Tensor, key: int) -> bool:
    """Whether a tensor lies in the memory with this key."""
    return any(storage_key(plain) == key for plain in unwrapped(tensor))


def other_owners(key: int) -> list[str]:
    """Types (and names, where there are some) of the Python objects that hold this memory."""
    tensors = [
        value
        for value in gc.get_objects()
        if issubclass(type(value), torch.Tensor) and holds(value, key)
    ]
    owners: list[str] = []
    for tensor in tensors:
        for referrer in gc.get_referrers(tensor):
            if referrer is not tensors and not isinstance(referrer, types.FrameType):
                owners.append(_describe(referrer, tensor))
    return sorted(set(owners))


def _describe(referrer: Any, tensor: torch.Tensor) -> str:
    if isinstance(referrer, dict):
        names = [repr(key) for key, value in referrer.items() if value is tensor]
        return f"a dict under {', '.join(names)}"
    attributes = getattr(referrer, "__dict__", {})
    names = [key for key, value in attributes.items() if value is tensor]
    cls = type(referrer)
    return f"{cls.__module__}.{cls.__qualname__}" + (f".{names[0]}" if names else "")
