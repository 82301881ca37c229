"""GLM-5.3-Flash's tensors under published names: views on the way in, whole on the way out."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from components.models.glm_flash.hf import adapter as adapter_module
from components.models.glm_flash.hf.adapter import assign_files
from components.models.glm_flash.hf.stacked import split_experts
from tests.unit.glm_hf_support import (
    EXPERTS,
    equal,
    memory_tensors,
    native_tensors,
    new_adapter,
    release_tensors,
)

STACK = "layers.1.moe.routed_experts.inner_experts.w1_EFD"
RELEASE = "model.language_model.layers.1.mlp.experts.{}.gate_proj.weight"


def test_experts_are_views_and_the_native_tensors_come_back() -> None:
    adapter, native = new_adapter(), native_tensors()
    states = adapter.to_hf(native)
    first = native[STACK].data_ptr()
    bytes_each = native[STACK][0].numel() * 4
    for expert in range(EXPERTS):
        assert states[RELEASE.format(expert)].data_ptr() == first + expert * bytes_each
    assert adapter.from_hf(states) is native


def test_parameters_that_want_gradients_are_loaded_in_place() -> None:
    native = {name: torch.nn.Parameter(tensor) for name, tensor in native_tensors().items()}
    matrix = new_adapter().to_hf(native)[RELEASE.format(2)]
    matrix.fill_(7.0)
    assert native[STACK][2].eq(7).all() and not native[STACK][1].eq(7).any()


@pytest.mark.parametrize("layout", ["release", "memory"])
@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_whole_tensors_of_any_layout_become_native(layout: str, prefix: str) -> None:
    tensors = release_tensors() if layout == "release" else memory_tensors()
    tensors = {name.replace("model.language_model.", prefix): t for name, t in tensors.items()}
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(2)
    assert equal(new_adapter().from_hf(tensors), native_tensors())


def test_a_replaced_entry_is_used() -> None:
    adapter = new_adapter()
    states = adapter.to_hf(native_tensors())
    states[RELEASE.format(0)] = torch.zeros(9, 16)
    assert adapter.from_hf(states)[STACK][0].eq(0).all()


def test_unknown_tensors_and_lost_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.bias"):
        new_adapter().to_hf({"layers.0.attention.bias": torch.ones(2)})
    with pytest.raises(ValueError, match=r"some\.weight: unknown"):
        new_adapter().from_hf({"some.weight": torch.ones(2)})
    tensors = release_tensors()
    del tensors[RELEASE.format(1)]
    with pytest.raises(ValueError, match=r"w1_EFD: experts \[1\] are missing"):
        new_adapter().from_hf(tensors)


CASES = {
    # name: (mesh, names, placements, experts)
    "expert parallel": ((4,), ("ep",), [Shard(0)], 8),
    "uneven": ((4,), ("ep",), [Shard(0)], 6),
    "more ranks than experts": ((4,), ("ep",), [Shard(0)], 3),
    "fsdp inside ep": ((2, 2), ("efsdp", "ep"), [_StridedShard(0, split_factor=2), Shard(0)], 8),
    "rows inside ep": ((2, 2), ("efsdp", "ep"), [Shard(1), Shard(0)], 8),
    "uneven rows": ((4,), ("fsdp",), [Shard(1)], 2),
    "hybrid": ((2, 2), ("replicate", "ep"), [Replicate(), Shard(0)], 8),
    "hybrid rows": ((2, 2), ("replicate", "fsdp"), [Replicate(), Shard(1)], 2),
    "replicated": ((4,), ("replicate",), [Replicate()], 2),
}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("case", CASES)
def test_every_rank_names_the_experts_that_it_holds(case: str, rank: int) -> None:
    shape, mesh_names, placements, experts = CASES[case]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=mesh_names)
        # Every element tells its place, so that a view shows which expert and rows it is.
        whole = torch.arange(experts * 6 * 5).view(experts, 6, 5)
        stack = DTensor.from_local(
            cut(whole, rank, case), mesh, placements, run_check=False,
            shape=whole.shape, stride=whole.stride(),
        )  # fmt: skip
        found = dict(split_experts(stack))
        held = stack.to_local()
        assert len(found) == len(held)
        for position, (expert, matrix) in enumerate(found.items()):
            local = matrix.to_local() if isinstance(matrix, DTensor) else matrix
            assert matrix.shape == (6, 5)
            assert local.data_ptr() == held[position].data_ptr()
            assert set(local.flatten().tolist()) <= set(whole[expert].flatten().tolist())
            sharded_rows = any(isinstance(p, Shard) and p.dim == 1 for p in placements)
            assert isinstance(matrix, DTensor) == sharded_rows
            if sharded_rows:
                assert matrix.placements == (Shard(0),)
    finally:
        dist.destroy_process_group()


def cut(whole: torch.Tensor, rank: int, case: str) -> torch.Tensor:
    """This rank's part, written out for each case."""
    outer, inner = divmod(rank, 2)
    match case:
        case "expert parallel" | "uneven" | "more ranks than experts":
            size = math.ceil(len(whole) / 4)
            return whole[rank * size : (rank + 1) * size]
        case "fsdp inside ep":
            return whole[inner * 4 + outer * 2 :][:2]
        case "rows inside ep":
            return whole[inner * 4 :][:4, outer * 3 :][:, :3]
        case "uneven rows":
            return whole[:, rank * 2 :][:, :2]
        case "hybrid":
            return whole[inner * 4 :][:4]
        case "hybrid rows":
            return whole[:, inner * 3 :][:, :3]
        case _:
            return whole


def test_files_are_filled_in_order_and_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "FILE_BYTES", 100)
    sizes = {f"t{i}": 30 for i in range(20)}
    numbers = assign_files(sizes, world_size=1)
    assert list(numbers.values()) == sorted(numbers.values())
    assert set(numbers.values()) == set(range(1, 7))
    assert assign_files({"one": 7}, world_size=64) == {"one": 1}


def test_many_ranks_write_fewer_files() -> None:
    sizes = {f"t{i}": 10**9 for i in range(600)}
    for world_size, most in ((1, 120), (16, 32), (64, 8), (1024, 1)):
        files = max(assign_files(sizes, world_size).values())
        assert files <= most
        assert files == 1 or files * world_size * min(5, math.ceil(files / world_size)) <= 512
    assert max(assign_files(sizes, 64).values()) == 8


def test_every_exported_name_has_a_file() -> None:
    adapter = new_adapter()
    states = adapter.to_hf(native_tensors())
    assert adapter.fqn_to_index_mapping is not None
    assert adapter.fqn_to_index_mapping.keys() == states.keys()
