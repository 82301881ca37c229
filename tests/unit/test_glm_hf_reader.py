"""Published checkpoints are read from any layout, slice by slice, or refused in one message."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef

from components.models.glm_flash.hf import slices
from components.models.glm_flash.hf.fp8 import dequantize, scale_shape
from components.titan.story import STORY
from tests.unit.glm_hf_support import (
    equal,
    memory_tensors,
    native_shapes,
    native_tensors,
    new_adapter,
    quantize,
    release_tensors,
    write_checkpoint,
)

LAYER = "model.language_model.layers."


def load(folder: Path, dtype: torch.dtype = torch.float32, quantized: bool = False) -> dict:
    """Load as torchtitan does; what the model held before must be gone."""
    adapter = new_adapter()
    target = {
        name: torch.full_like(tensor, float("nan"))
        for name, tensor in native_tensors(dtype).items()
    }
    states = adapter.to_hf(target)
    dcp.load(states, storage_reader=adapter.get_hf_storage_reader(str(folder), quantized))
    loaded = adapter.from_hf(states)
    assert loaded is target
    return loaded


def reference_dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (127, 129), (300, 513), (256, 40)])
def test_dequantising_multiplies_each_block_by_its_factor(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values, scales = quantize(torch.randn(shape))
    assert tuple(scales.shape) == scale_shape(shape)
    assert torch.equal(dequantize(values, scales), reference_dequantize(values, scales))


@pytest.mark.parametrize("box", [(0, 300, 0, 513), (100, 130, 200, 300), (127, 129, 512, 513)])
def test_a_part_is_dequantised_like_the_whole(box: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    values, scales = quantize(torch.randn(300, 513))
    top, bottom, left, right = box
    part = dequantize(values[top:bottom, left:right], scales, top, left)
    assert torch.equal(part, reference_dequantize(values, scales)[top:bottom, left:right])


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
@pytest.mark.parametrize("layout", ["release", "memory"])
@pytest.mark.parametrize("count", [1, 3])
def test_every_layout_and_prefix_gives_the_same_model(
    tmp_path: Path, prefix: str, layout: str, count: int
) -> None:
    tensors = release_tensors() if layout == "release" else memory_tensors()
    renamed = {name.replace("model.language_model.", prefix): t for name, t in tensors.items()}
    folder = write_checkpoint(tmp_path, renamed, files=count, index=count > 1)
    assert equal(load(folder), native_tensors())


def test_files_may_mix_layouts(tmp_path: Path) -> None:
    memory, release = memory_tensors(), release_tensors()
    first = {name: tensor for name, tensor in memory.items() if ".layers.1." in name}
    others = {name: tensor for name, tensor in release.items() if ".layers.1." not in name}
    assert equal(load(write_checkpoint(tmp_path, first | others)), native_tensors())


def test_values_take_the_type_of_the_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, release_tensors(dtype=torch.bfloat16))
    assert equal(load(folder, torch.float32), native_tensors(torch.float32))


def with_float8(tensors: dict[str, torch.Tensor], leaf: str) -> dict[str, torch.Tensor]:
    """Store every tensor whose name ends so in float8, and return what it stands for beside it."""
    stored, meaning = dict(tensors), {}
    for name in [name for name in tensors if name.endswith(leaf)]:
        values, scales = quantize(tensors[name])
        meaning[name] = reference_dequantize(values, scales)
        # Apart in order, so that they land in different files.
        stored = {f"{name}_scale_inv": scales, **stored, name: values}
    return stored | {"meaning": meaning}  # type: ignore[dict-item]


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_float8_is_dequantised_with_and_without_the_flag(
    tmp_path: Path, quantized: bool, count: int
) -> None:
    torch.manual_seed(0)
    stored = with_float8(release_tensors(), "up_proj.weight")
    meaning: Any = stored.pop("meaning")
    folder = write_checkpoint(tmp_path, stored, files=count)
    loaded = new_adapter().to_hf(load(folder, quantized=quantized))
    assert len(meaning) == 1 + 2 * (4 + 1)
    assert equal(dict(loaded), release_tensors() | meaning)


def test_fused_float8_experts_are_dequantised(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = memory_tensors()
    name = f"{LAYER}1.mlp.experts.gate_up_proj"
    quantized = [quantize(expert) for expert in tensors[name]]
    tensors[name] = torch.stack([values for values, _ in quantized])
    tensors[f"{name}_scale_inv"] = torch.stack([scales for _, scales in quantized])
    loaded = load(write_checkpoint(tmp_path, tensors))
    for expert, (values, scales) in enumerate(quantized):
        whole = reference_dequantize(values, scales)
        stack = "layers.1.moe.routed_experts.inner_experts."
        assert torch.equal(loaded[f"{stack}w1_EFD"][expert], whole[:9])
        assert torch.equal(loaded[f"{stack}w3_EFD"][expert], whole[9:])


def test_the_flag_without_float8_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, release_tensors())
    with pytest.raises(ValueError, match=r"checkpoint\.initial_load_in_hf_quantized: true"):
        load(folder, quantized=True)


def test_vision_and_prediction_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {
        "model.visual.blocks.0.attn.qkv.weight": torch.ones(3, 2),
        # Types that nothing here can read are no obstacle in what is not read.
        "model.visual.merger.proj.weight": torch.ones(3, 2, dtype=torch.int32),
        f"{LAYER}3.eh_proj.weight": torch.ones(3, 2),
        f"{LAYER}3.input_layernorm.weight": torch.ones(3),
        f"{LAYER}3.mlp.experts.0.up_proj.weight": torch.ones(3, 2),
    }
    folder = write_checkpoint(tmp_path, release_tensors() | extra)
    with caplog.at_level(logging.INFO, STORY):
        assert equal(load(folder), native_tensors())
    (line,) = [record.getMessage() for record in caplog.records if record.name == STORY]
    assert "2 vision tensors" in line and "3 prediction (MTP) tensors" in line
    assert f"{len(release_tensors())} tensors of the text model" in line


def test_everything_that_does_not_fit_is_in_one_message(tmp_path: Path) -> None:
    tensors = release_tensors()
    tensors["model.language_model.strange.weight"] = torch.ones(2)
    tensors[f"{LAYER}4.input_layernorm.weight"] = torch.ones(2)
    del tensors["lm_head.weight"]
    for expert in (1, 2):
        del tensors[f"{LAYER}2.mlp.experts.{expert}.gate_proj.weight"]
    tensors[f"{LAYER}0.self_attn.o_proj.weight"] = torch.ones(5, 6)
    tensors["norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    tensors[f"{LAYER}1.mlp.gate.weight"] = torch.ones(4, 16, dtype=torch.int32)
    tensors[f"{LAYER}1.mlp.shared_experts.up_proj.weight"] = quantize(torch.ones(9, 16))[0]
    tensors[f"{LAYER}2.mlp.shared_experts.up_proj.weight"] = quantize(torch.ones(9, 16))[0]
    tensors[f"{LAYER}2.mlp.shared_experts.up_proj.weight_scale_inv"] = torch.ones(2, 1)
    with pytest.raises(ValueError, match="does not hold the tensors of this model") as raised:
        load(write_checkpoint(tmp_path, tensors))
    message = str(raised.value)
    assert "unknown (2):" in message and "missing (3):" in message and str(tmp_path) in message
    assert "model.language_model.strange.weight" in message
    assert f"{LAYER}4.input_layernorm.weight" in message
    assert "lm_head.weight" in message
    assert f"{LAYER}2.mlp.experts.{{1-2}}.gate_proj.weight  (2 tensors)" in message
    assert f"{LAYER}0.self_attn.o_proj.weight: found [5, 6], expected [16, 12]" in message
    assert "norm.weight is given by" in message
    assert f"{LAYER}1.mlp.gate.weight: type I32" in message
    assert f"{LAYER}1.mlp.shared_experts.up_proj.weight: F8_E4M3 without its scales" in message
    assert "up_proj.weight_scale_inv: found [2, 1], expected [1, 1]" in message
    assert "of the wrong shape, or unusable (5):" in message


def test_fused_tensors_of_another_size_are_named_with_their_source(tmp_path: Path) -> None:
    tensors = memory_tensors()
    tensors[f"{LAYER}1.mlp.experts.gate_up_proj"] = torch.ones(5, 16, 16)
    with pytest.raises(ValueError) as raised:
        load(write_checkpoint(tmp_path, tensors))
    message = str(raised.value)
    experts = f"{LAYER}1.mlp.experts."
    assert f"{experts}4.up_proj.weight (in {experts}gate_up_proj)" in message
    assert "found [8, 16], expected [9, 16]" in message


def test_a_model_with_more_layers_misses_them(tmp_path: Path) -> None:
    tensors = {name: t for name, t in release_tensors().items() if ".layers.2." not in name}
    # The layer before it is not taken for a prediction layer, either.
    with pytest.raises(ValueError) as raised:
        load(write_checkpoint(tmp_path, tensors))
    missing = sum(name.startswith("layers.2.") for name in native_shapes()) + 3 * (4 - 1)
    assert f"missing ({missing}):" in str(raised.value)


def test_only_slices_are_read_and_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call of safetensors but get_slice, and none for more than the piece that is wanted."""
    folder = write_checkpoint(tmp_path, memory_tensors())
    read: list[int] = []
    alive: list[StorageWeakRef] = []

    class SliceOnly:
        def __init__(self, opened: Any) -> None:
            self._opened = opened

        def __getitem__(self, where: Any) -> torch.Tensor:
            alive[:] = [reference for reference in alive if not reference.expired()]
            assert not alive, "the tensor before is still in memory"
            result = self._opened[where]
            alive.append(StorageWeakRef(result.untyped_storage()))
            read.append(result.numel())
            return result

    class FileOnly:
        def __init__(self, path: Path, framework: str) -> None:
            self._context = real(path, framework=framework)

        def __enter__(self) -> "FileOnly":
            self._opened = self._context.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self._context.__exit__(*exception)

        def get_slice(self, name: str) -> SliceOnly:
            return SliceOnly(self._opened.get_slice(name))

    real = slices.safe_open
    monkeypatch.setattr(slices, "safe_open", FileOnly)
    assert equal(load(folder), native_tensors())
    assert sorted(read) == sorted(tensor.numel() for tensor in release_tensors().values())


@pytest.mark.parametrize("damage", ["short", "not_safetensors", "missing", "empty", "parts"])
def test_damaged_folders_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    folder = write_checkpoint(tmp_path, release_tensors(), files=2)
    victim = folder / "model-00002-of-00002.safetensors"
    if damage == "short":
        victim.write_bytes(victim.read_bytes()[:-8])
    elif damage == "not_safetensors":
        victim.write_bytes(b"\xff" * 64)
    elif damage == "missing":
        victim.unlink()
    elif damage == "parts":
        save_file({"norm.weight": torch.ones(2)}, victim, {"DCP_SHARDING_INFO": "{}"})
    else:
        for file in folder.iterdir():
            file.unlink()
    with pytest.raises(ValueError, match="00002-of-00002" if damage != "empty" else "no weights"):
        load(folder)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight is in a\.safetensors and in b\.safe"):
        load(tmp_path)
