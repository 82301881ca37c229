"""What tests of planned experts on several ranks measure and swap."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from components.expert_dispatch.weights import Return
from tests.swaps import replaced


def assert_close(found: torch.Tensor, wanted: torch.Tensor, limit: float, what: str) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, what
    error = (found - wanted).norm() / wanted.norm().clamp(min=1e-12)
    assert error <= limit, f"{what}: {error:.2e}"


def row_by_row(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A grouped product whose arithmetic on a row does not depend on the rows beside it."""
    group = torch.searchsorted(ends, torch.arange(len(x)), right=True)
    return (x.unsqueeze(1) * weight[group]).sum(-1)


def row_by_row_back(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return row_by_row(x, weight.transpose(1, 2), ends)


class Watched(torch.Tensor):
    """As if it were on a device: whatever is computed of it is ``Watched`` as well, and its numbers
    are on the host only once they have been read, which is counted.

    Attributes:
        reads: so far.
    """

    reads = 0
    READ = ("cpu", "item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = super().__torch_function__(function, types, args, kwargs or {})
        if getattr(function, "__name__", "") not in cls.READ:
            return found
        cls.reads += 1
        return found.as_subclass(torch.Tensor) if isinstance(found, Watched) else found


@contextmanager
def at_most(copies: int) -> Iterator[None]:
    """Gradients of at most so many copies are there and not yet added to their expert's own."""
    waiting: dict[int, int] = {}
    make, add = Return.__init__, Return.add_to

    def made(back: Return, arriving: list, *args: Any) -> None:
        waiting[id(back)] = len(arriving)
        assert sum(waiting.values()) <= copies
        make(back, arriving, *args)

    def added(back: Return, own: torch.Tensor) -> None:
        add(back, own)
        del waiting[id(back)]

    with replaced(Return, "__init__", made), replaced(Return, "add_to", added):
        yield
    assert not waiting
