"""The streamed AdamW on shards as FSDP makes them: uneven, empty, replicated, of two mesh axes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from components.core.shards import local_of
from components.streamed_adamw.optimizer import OffloadStreamAdamW
from tests.unit.streamed_support import Ram

CASES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, Placement]]] = [
    ((5, 8), (2, 8), (Replicate(), Shard(0))),
    ((1, 5), (0, 5), (Replicate(), Shard(0))),
    ((70,), (35,), (Replicate(), Shard(0))),
    ((4, 6), (2, 3), (Shard(0), Shard(1))),
    ((9,), (9,), (Replicate(), Replicate())),
]
"""Shape, this rank's part of it, placements."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """The last of four ranks, in a group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()


def spread(mesh: DeviceMesh, seed: int) -> list[DTensor]:
    random = torch.Generator().manual_seed(seed)
    return [
        DTensor.from_local(
            torch.randn(part, generator=random), mesh, placements, run_check=False,
            shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride(),
        )
        for shape, part, placements in CASES
    ]  # fmt: skip


def trained(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for step in range(6):
        mesh = parameters[0].data.device_mesh
        for parameter, gradient in zip(parameters, spread(mesh, step), strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("split", [0, 0.5])
def test_shards_are_updated_as_torchs_adamw_does(mesh: DeviceMesh, split: float) -> None:
    expected = [nn.Parameter(tensor) for tensor in spread(mesh, 99)]
    mine = [nn.Parameter(tensor) for tensor in spread(mesh, 99)]
    reference = torch.optim.AdamW(expected, lr=0.01, fused=True)
    optimizer = OffloadStreamAdamW(mine, lr=0.01, host=Ram, split=split, bucket_parameters=64)
    assert optimizer.host_bytes >= 12 * sum(local_of(parameter).numel() for parameter in mine)
    trained(expected, reference)
    trained(mine, optimizer)
    optimizer.close()
    for ours, theirs in zip(mine, expected, strict=True):
        assert torch.equal(local_of(ours), local_of(theirs))
        state, wanted = optimizer.state[ours], reference.state[theirs]
        assert torch.equal(state["step"], wanted["step"])
        pairs = [(optimizer.masters[ours], theirs)]
        pairs += [(state[key], wanted[key]) for key in ("exp_avg", "exp_avg_sq")]
        for a, b in pairs:
            assert isinstance(a, DTensor) and isinstance(b, DTensor)
            assert (a.device_mesh, a.placements, a.shape) == (b.device_mesh, b.placements, b.shape)
            assert a.dtype == torch.float32 and torch.equal(local_of(a), local_of(b))


def test_state_of_another_layout_is_refused(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(spread(mesh, 1)[0])
    optimizer = OffloadStreamAdamW([parameter], host=Ram, split=0)
    saved = optimizer.state_dict()
    odd = DTensor.from_local(torch.ones(5, 8), mesh, (Replicate(), Replicate()), run_check=False)
    saved["state"][0] = {**saved["state"][0], "exp_avg": odd}
    with pytest.raises(ValueError, match="saved exp_avg of group 0 parameter 0 is"):
        optimizer.load_state_dict(saved)


def test_a_gradient_of_another_layout_is_refused(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(spread(mesh, 1)[0])
    optimizer = OffloadStreamAdamW([parameter], host=Ram, split=0)
    parameter.grad = DTensor.from_local(
        torch.ones(5, 8), mesh, (Replicate(), Replicate()), run_check=False
    )
    with pytest.raises(ValueError, match="the gradient of group 0 parameter 0 is"):
        optimizer.step()
