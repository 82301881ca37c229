"""Two ranks share a GLM-5.3-Flash: each reads and writes its part of a published checkpoint."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from components.models.glm_flash.hf.names import is_stacked
from components.titan.checkpoint import RunCheckpoints
from tests.distributed.spawn import run_ranks
from tests.unit.glm_hf_support import (
    equal,
    memory_tensors,
    native_tensors,
    new_adapter,
    release_tensors,
    write_checkpoint,
)

pytestmark = pytest.mark.distributed

# Mesh, and placements of the stacked experts. The expert width of 9 is cut into 5 and 4.
EXPERTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], list[Placement]]] = {
    "ep": ((2,), ("ep",), [Shard(0)]),
    "fsdp_outside_ep": ((2, 1), ("efsdp", "ep"), [_StridedShard(0, split_factor=1), Shard(0)]),
    "ep_and_fsdp": ((1, 2), ("efsdp", "ep"), [_StridedShard(0, split_factor=2), Shard(0)]),
    "rows": ((2, 1), ("efsdp", "ep"), [Shard(1), Shard(0)]),
    "replicas": ((2, 1), ("replicate", "ep"), [Replicate(), Shard(0)]),
}


def local(whole: torch.Tensor, stacked: bool, layout: str, rank: int) -> torch.Tensor:
    """This rank's part of a tensor, written out."""
    if not stacked:
        return whole.chunk(2)[rank] if len(whole) > 1 else whole[rank:]
    if layout == "rows":
        return whole.chunk(2, dim=1)[rank]
    return whole if layout == "replicas" else whole.chunk(2)[rank]


class Sharded(nn.Module):
    """Holds the given tensors' parts, filled with nonsense, under their names."""

    def __init__(self, layout: str, dense: DeviceMesh, experts: DeviceMesh) -> None:
        super().__init__()
        self.parts: dict[str, torch.Tensor] = {}
        for name, whole in native_tensors().items():
            stacked = is_stacked(name)
            mesh = experts if stacked else dense
            part = torch.full_like(local(whole, stacked, layout, dist.get_rank()), float("nan"))
            self.parts[name] = part
            tensor = DTensor.from_local(
                part, mesh, EXPERTS[layout][2] if stacked else [Shard(0)], run_check=False,
                shape=whole.shape, stride=whole.stride(),
            )  # fmt: skip
            path, _, leaf = name.rpartition(".")
            home: nn.Module = self
            for step in path.split(".") if path else []:
                if not hasattr(home, step):
                    home.add_module(step, nn.Module())
                home = getattr(home, step)
            home.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def load_and_export(source: str, out: str) -> None:
    """One rank: load and export once per placement."""
    dist.init_process_group("gloo")
    dense = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    for layout, (shape, names, _) in EXPERTS.items():
        experts = init_device_mesh("cpu", shape, mesh_dim_names=names)
        module = Sharded(layout, dense, experts)
        manager = RunCheckpoints.Config(
            initial_load_path=source, initial_load_in_hf=True, initial_load_model_only=True,
            last_save_in_hf=True, last_save_model_only=True, export_dtype="bfloat16",
            keep_latest_k=0,
        ).build(
            dataloader=None, model_parts=[module], optimizers=None, lr_schedulers=None, states={},
            sd_adapter=new_adapter(), base_folder=f"{out}/{layout}",
        )  # fmt: skip
        assert manager.load()
        # The storage from before loading holds the values: nothing was copied on the way.
        for name, whole in native_tensors().items():
            expected = local(whole, is_stacked(name), layout, dist.get_rank())
            assert torch.equal(module.parts[name], expected), (layout, name)
        manager.save(1, last_step=True)
        manager.close()
    dist.destroy_process_group()


def test_sharded_models_load_in_place_and_export_whole_tensors(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", memory_tensors(), files=2)
    run_ranks(load_and_export, 2, tmp_path, str(source), str(tmp_path / "out"))
    # Written in bfloat16, in which the tests' values are exact, but for what stays in float32.
    expected = release_tensors(dtype=torch.bfloat16)
    for layout in EXPERTS:
        folder = tmp_path / "out" / layout / "checkpoint/step-1"
        exported: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            exported |= load_file(file)
        assert equal(exported, expected), layout
        assert (folder / "config.json").is_file()
