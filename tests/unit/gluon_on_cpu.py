"""Run a Gluon kernel of one warpgroup in plain torch: what it computes, not how threads share it.

Gluon has no interpreter. Here its functions are called as the Python they are, with torch behind
``gl``: layouts mean nothing, and a program is one thread. A bulk copy is done when it is issued, so
that one which comes too early overwrites what is still to be read; a barrier knows its phase, so
that a wait which would never end is an error, and so are two stores to one place. Only what the
indexer's kernel uses is here.
"""

import itertools
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonJITFunction


class Value(torch.Tensor):
    """A tensor with a layout to ask for."""

    type = property(lambda self: SimpleNamespace(layout=None))


class Pointer:
    """Elements of a flat tensor."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)


class Descriptor:
    """Rows of a matrix, fetched in blocks; beyond its end there are zeros."""

    layout = None

    def __init__(self, rows: torch.Tensor, block: int) -> None:
        self.rows, self.block, self.dtype = rows, block, rows.dtype
        self.nbytes_per_cta = block * rows.shape[1] * rows.itemsize


class Shared:
    """Shared memory, or barriers if it is a list of them."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.shape = data, data.shape

    def index(self, i: int) -> "Shared":
        return Shared(self.data[i])

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(order))


class Barrier:
    """Completes a phase with one announcement of bytes and the arrival of as many."""

    def __init__(self) -> None:
        self.phases, self.waited, self.announced, self.arrived = 0, 0, None, 0
        self.ready = False

    def settle(self) -> None:
        if self.announced is not None and self.announced == self.arrived:
            self.phases, self.announced, self.arrived = self.phases + 1, None, 0


def _value(x: Any) -> Any:
    return x.as_subclass(Value) if isinstance(x, torch.Tensor) else x


def _load(at: Pointer, mask: Any, other: float) -> Any:
    index, mask = torch.broadcast_tensors(torch.as_tensor(at.offset), mask)
    out = torch.full(index.shape, other, dtype=at.memory.dtype)
    out[mask] = at.memory[index[mask].long()]
    return _value(out)


class Stores:
    """Stores of all programs of a launch, each to a place of its own."""

    def __init__(self) -> None:
        self.places: dict[int, torch.Tensor] = {}

    def store(self, at: Pointer, value: Any, mask: Any) -> None:
        index, value, mask = torch.broadcast_tensors(at.offset, value, mask)
        index, memory = index[mask].long().as_subclass(torch.Tensor), at.memory
        taken = self.places.setdefault(memory.data_ptr(), torch.zeros(len(memory)))
        taken.index_add_(0, index, torch.ones(len(index)))
        assert not len(index) or taken[index].max() == 1, "two stores to one place"
        memory[index] = value[mask].as_subclass(torch.Tensor)


def _maximum(a: Any, b: Any, propagate_nan: Any = None) -> Any:
    if not isinstance(a, torch.Tensor):
        return max(a, b)
    return (torch.fmax if propagate_nan is None else torch.maximum)(a, torch.as_tensor(b))


def _reduce(x: Any, axis: int, function: Callable[[Any, Any], Any]) -> Any:
    total, *rest = x.unbind(axis)
    for part in rest:
        total = function(total, part)
    return total


def _async_load(source: Descriptor, at: list[int], barrier: Barrier, to: Shared, pred: bool = True):
    if pred:
        rows = source.rows[at[0] : at[0] + source.block]
        to.data.zero_()
        to.data[: len(rows)] = rows
        barrier.arrived += source.nbytes_per_cta
        barrier.settle()


def _expect(barrier: Barrier, nbytes: int, pred: bool = True) -> None:
    if pred:
        assert barrier.ready and barrier.announced is None
        barrier.announced = nbytes
        barrier.settle()


def _init(barrier: Barrier, count: int) -> None:
    assert count == 1
    barrier.ready = True


def _wait(barrier: Barrier, phase: int, pred: bool = True) -> None:
    if not pred:
        return
    assert barrier.phases % 2 != phase, "waits for ever"
    barrier.waited += 1


class _Barriers:
    def __init__(self, batch: int) -> None:
        self.all = [Barrier() for _ in range(batch)]

    def index(self, i: int) -> Barrier:
        return self.all[i]


def _language(program: tuple[int, int], stores: Stores) -> SimpleNamespace:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return SimpleNamespace(
        constexpr=int, SliceLayout=nothing, barrier=nothing, static_range=range,
        float32=torch.float32, int64=torch.int64,
        program_id=program.__getitem__,
        arange=lambda a, b, layout: _value(torch.arange(a, b)),
        zeros=lambda shape, dtype, layout: _value(torch.zeros(shape, dtype=dtype)),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.empty(shape, dtype=dtype)),
        load=_load, store=stores.store,
        where=lambda c, a, b: _value(torch.where(torch.as_tensor(c), a, b)),
        maximum=_maximum, minimum=min, reduce=_reduce, fma=lambda a, b, c: a * b + c,
        min=lambda x, axis: int(x.amin(axis)), max=lambda x, axis: int(x.amax(axis)),
        sum=lambda x, axis: x.sum(axis), convert_layout=lambda x, layout: x,
        broadcast=torch.broadcast_tensors, expand_dims=lambda x, axis: x.unsqueeze(axis),
        reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.permute(order),
        split=lambda x: x.unbind(-1),
    )  # fmt: skip


def run(kernel: GluonJITFunction, module: ModuleType, grid: tuple[int, int], *args, **kwargs):
    """Call every program of ``kernel``, which is one of ``module``.

    Tensors among the arguments become pointers; ``Descriptor`` says which are none.
    """
    stores = Stores()

    def pointed(x: Any) -> Any:
        return Pointer(x.view(-1)) if isinstance(x, torch.Tensor) else x

    args = tuple(map(pointed, args))
    kwargs = {name: pointed(x) for name, x in kwargs.items()}
    for program in itertools.product(*map(range, grid)):
        here, barriers = dict(vars(module)), []

        def allocate(batch: int, barriers: list[_Barriers] = barriers) -> _Barriers:
            barriers.append(_Barriers(batch))
            return barriers[-1]

        here.update(
            gl=_language(program, stores),
            mbarrier=SimpleNamespace(
                allocate_mbarrier=allocate, init=_init, expect=_expect, wait=_wait
            ),
            tma=SimpleNamespace(async_load=_async_load),
            fence_async_shared=lambda: None,
            warpgroup_mma=lambda a, b, acc, **_: _value(a.data.float() @ b.data.float()),
            warpgroup_mma_wait=lambda pending, deps: deps[0],
        )
        for name, value in vars(module).items():
            if isinstance(value, GluonJITFunction):
                here[name] = FunctionType(value.fn.__code__, here)
            elif name.endswith("_layout"):
                here[name] = lambda *args: None
        FunctionType(kernel.fn.__code__, here)(*args, **kwargs)
        for barrier in (b for group in barriers for b in group.all):
            assert barrier.waited == barrier.phases, "a copy may still be under way at the end"


class Launched:
    """Stands in for ``kernel`` of ``module``: called with a grid and options, as on a GPU."""

    def __init__(self, kernel: GluonJITFunction, module: ModuleType) -> None:
        self.kernel, self.module = kernel, module

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **kwargs: Any) -> None:
            assert num_warps == 4, "layouts are those of one warpgroup"
            run(self.kernel, self.module, grid, *args, **kwargs)

        return launch
