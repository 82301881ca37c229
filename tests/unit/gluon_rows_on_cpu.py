"""Run a Gluon kernel that works on one row a program in numpy: what it computes, not by whom.

As ``gluon_on_cpu``, for kernels that compute with unsigned numbers, bits and positions: an access
outside of memory is an error, and so are two stores to one place. Layouts mean nothing.
"""

import operator
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon._runtime import GluonJITFunction


class Value:
    """An array or a number, with the methods of a tensor in a kernel."""

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)

    def to(self, dtype: Any, bitcast: bool = False) -> "Value":
        return Value(self.data.view(dtype) if bitcast else self.data.astype(dtype))

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __invert__(self) -> "Value":
        return Value(~self.data)

    def __floordiv__(self, other: Any) -> "Value":
        assert (self.data >= 0).all()  # below zero a GPU rounds to zero
        return Value(self.data // _raw(other))


def _add_operator(name: str, function: Callable[[Any, Any], Any]) -> None:
    def forward(self: Value, other: Any) -> Value:
        return Value(function(self.data, _raw(other)))

    def backward(self: Value, other: Any) -> Value:
        return Value(function(_raw(other), self.data))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", backward)  # of comparisons it is never asked for


for _name in ("add", "sub", "mul", "xor", "rshift", "lt", "le", "gt", "ge", "eq", "ne"):
    _add_operator(_name, getattr(operator, _name))
_add_operator("or", operator.or_)
_add_operator("and", operator.and_)


class Pointer:
    """Elements of a flat array."""

    def __init__(self, memory: np.ndarray, offset: Any = 0) -> None:
        self.memory, self.offset = memory, np.asarray(offset, dtype=np.int64)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + _raw(offset))

    def __sub__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset - _raw(offset))

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Where a mask is set and which elements that is; all are checked."""
        mask = np.broadcast_to(_raw(mask), self.offset.shape)
        places = self.offset[mask]
        assert (places >= 0).all() and (places < len(self.memory)).all(), "outside of memory"
        return mask, places


class Shared:
    """Shared memory of one dimension."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.data[start : start + length])

    def load(self, layout: Any) -> Value:
        return Value(self.data.copy())

    def gather(self, places: Value, axis: int) -> Value:
        return Value(self.data[self._checked(places)])

    def scatter(self, values: Value, places: Value, axis: int) -> None:
        self.data[self._checked(places)] = values.data

    def _checked(self, places: Value) -> np.ndarray:
        inside = (places.data >= 0) & (places.data < len(self.data))
        assert inside.all(), "outside of shared memory"
        return places.data


def _raw(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def _load(at: Pointer, mask: Any = True, other: float = 0.0) -> Value:
    mask, places = at.places(mask)
    out = np.full(at.offset.shape, other, at.memory.dtype)
    out[mask] = at.memory[places]
    return Value(out)


def _store(at: Pointer, value: Any, mask: Any = True) -> None:
    mask, places = at.places(mask)
    assert len(np.unique(places)) == len(places), "two stores to one place"
    at.memory[places] = np.broadcast_to(_raw(value), mask.shape)[mask]


def _reduce(function: Any) -> Any:
    return lambda x, axis: Value(function(x.data, axis=axis).astype(x.data.dtype))


def _multiple_of(x: Value, values: list[int]) -> Value:
    assert (x.data[:, :: values[1]] % values[1] == 0).all(), "a promise that is not kept"
    return x


def _max_contiguous(x: Value, values: list[int]) -> Value:
    steps = np.diff(x.data.reshape(-1, values[1]))
    assert (steps == 1).all(), "a promise that is not kept"
    return x


def _language(program: int) -> SimpleNamespace:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return SimpleNamespace(
        constexpr=object, BlockedLayout=nothing, SliceLayout=nothing, SwizzledSharedLayout=nothing,
        int32=np.int32, uint32=np.uint32, int64=np.int64, float32=np.float32, barrier=nothing,
        program_id=lambda axis: Value(np.int32(program)), load=_load, store=_store,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(np.full(shape, 77, dtype)),
        where=lambda c, a, b: Value(np.where(_raw(c), _raw(a), _raw(b))),
        arange=lambda a, b, layout: Value(np.arange(a, b, dtype=np.int32)),
        full=lambda shape, value, dtype, layout: Value(np.full(shape, value, dtype)),
        zeros=lambda shape, dtype, layout: Value(np.zeros(shape, dtype)),
        sum=_reduce(np.sum), max=_reduce(np.max), min=_reduce(np.min),
        maximum=lambda a, b: Value(np.maximum(_raw(a), _raw(b))),
        minimum=lambda a, b: Value(np.minimum(_raw(a), _raw(b))),
        to_tensor=lambda x: Value(np.int32(x)),
        associative_scan=lambda x, axis, function: Value(np.cumsum(x.data, axis, x.data.dtype)),
        expand_dims=lambda x, axis: Value(np.expand_dims(x.data, axis)),
        reshape=lambda x, shape: Value(x.data.reshape(shape)),
        convert_layout=lambda x, layout: x, multiple_of=_multiple_of,
        max_contiguous=_max_contiguous,
    )  # fmt: skip


def run(kernel: GluonJITFunction, module: ModuleType, programs: int, **arguments: Any) -> None:
    """Call every program of ``kernel``, one of ``module``; tensors become pointers."""
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            arguments[name] = Pointer(x.view(-1).numpy())
        elif isinstance(x, int) and name.islower():
            arguments[name] = Value(np.int32(x))
    for program in range(programs):
        here = {**vars(module), "gl": _language(program)}
        here["range"] = lambda *bounds: range(*map(int, bounds))
        for name, value in vars(module).items():
            if isinstance(value, GluonJITFunction):
                here[name] = FunctionType(value.fn.__code__, here)
            elif name.isupper() and hasattr(value, "value"):
                here[name] = value.value
        with np.errstate(all="ignore"):
            FunctionType(kernel.fn.__code__, here)(**arguments)


class Launched:
    """Stands in for ``kernel`` of ``module``: called with a grid and options, as on a GPU."""

    def __init__(self, kernel: GluonJITFunction, module: ModuleType) -> None:
        self.kernel, self.module = kernel, module

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
            assert num_warps == constants["WARPS"], "layouts are of as many warps as are started"
            assert num_warps <= 32 and 32 * num_warps * maxnreg <= 2**16, "more than there is"
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            run(self.kernel, self.module, grid[0], **named, **constants)

        return launch
