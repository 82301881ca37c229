"""What tests of planned experts on several ranks build, measure and swap."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed.spmd_types import set_spmd_meshes
from torchtitan.models.common.moe import RoutedExperts

from components.expert_dispatch.balanced_experts import BalancedRoutedExperts, balanced_experts
from components.expert_dispatch.weights import Return
from components.titan.dispatch import gloo
from tests.swaps import replaced
from tests.unit.experts_support import EXPERTS, build, config_of, routing

CHUNK = 8
DTYPES = {"glm": torch.float64, "moe": torch.bfloat16}
Routing = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
FIRST_HALF: Routing = partial(routing, experts=EXPERTS // 2)


@cache
def mesh_of(ranks: int) -> DeviceMesh:
    """Groups of so many neighbouring ranks."""
    sizes = dist.get_world_size() // ranks, ranks
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))["ep"]


def on_ranks(
    family: str, dtype: torch.dtype | None = None, ranks: int | None = None, **form: Any
) -> RoutedExperts:
    """This rank's share of the experts of a group; without a form, as torchtitan runs them."""
    config = config_of(family)
    config.token_dispatcher = gloo(config.token_dispatcher)
    if form:
        settings = {"capacity_factor": 1.0, "minimum_rows": 1, "threshold": 1.0} | form
        config = balanced_experts(config, **settings)
    experts = build(config, dtype or DTYPES[family])
    mesh = mesh_of(ranks or dist.get_world_size())
    each = EXPERTS // mesh.size()
    mine = slice(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)
    for parameter in experts.parameters():
        parameter.data = parameter.data[mine].clone()
    set_spmd_meshes(dense_mesh=mesh, sparse_mesh=mesh)
    experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return experts


def planned(family: str, dtype: torch.dtype | None = None, **form: Any) -> BalancedRoutedExperts:
    experts = on_ranks(family, dtype, **({"threshold": 1.0} | form))
    assert isinstance(experts, BalancedRoutedExperts)
    return experts


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
