"""Checkpoint folders are rewritten in another layout, a few rows at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from components.models.glm_flash.hf import convert as convert_module
from components.models.glm_flash.hf.convert import convert, main
from components.models.glm_flash.hf.slices import Slices
from components.models.glm_flash.hf.writer import Entry, shards, write_file
from tests.unit.glm_hf_support import (
    FLOAT32,
    equal,
    memory_tensors,
    quantize,
    release_tensors,
    write_checkpoint,
)

LAYER = "model.language_model.layers."
BIG = 10**9


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """What safetensors finds, checked against the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found = load_file(file)
        check_alignment(file)
        assert {index["weight_map"][name] for name in found} == {file.name}
        tensors |= found
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def check_alignment(file: Path) -> None:
    """Every tensor begins where a pointer to its elements may point."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    for name, entry in header.items():
        size = {"F32": 4, "BF16": 2}[entry["dtype"]]
        assert (8 + length + entry["data_offsets"][0]) % size == 0, name


def with_bfloat16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As converted: bfloat16, but for what stays in float32 (the values are exact in both)."""
    kept = (*FLOAT32, "conv1d.weight", "_base", "_scale", ".base", ".scale", "correction_bias")
    return {
        name: tensor if name.endswith(kept) else tensor.bfloat16()
        for name, tensor in tensors.items()
    }


LAYOUTS = {"release": release_tensors, "memory": memory_tensors}


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_shard", [1, 3000, BIG])
def test_each_layout_becomes_the_other(
    tmp_path: Path, source: str, layout: str, max_shard: int
) -> None:
    folder = write_checkpoint(tmp_path / "source", LAYOUTS[source](), files=2)
    convert(folder, tmp_path / "target", layout, max_shard)
    result = read_folder(tmp_path / "target")
    assert equal(result, with_bfloat16(LAYOUTS[layout]()))
    files = list((tmp_path / "target").glob("*.safetensors"))
    assert len(files) == {1: len(result), BIG: 1}.get(max_shard, len(files))
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = [result[name].nbytes for name in opened.keys()]  # noqa: SIM118
        assert len(sizes) == 1 or sum(sizes) <= max_shard


def test_there_and_back_in_float32_is_bit_equal(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", release_tensors())
    convert(folder, tmp_path / "b", "memory", BIG, torch.float32)
    convert(tmp_path / "b", tmp_path / "c", "release", 3000, torch.float32)
    assert equal(read_folder(tmp_path / "c"), release_tensors())


def test_float8_is_dequantised_and_the_config_forgets_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = release_tensors()
    expected = with_bfloat16(memory_tensors())
    for name in [name for name in tensors if "experts" in name and "gate_proj" in name]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name])
    for layer in (1, 2):
        stack = torch.stack([
            tensors[f"{LAYER}{layer}.mlp.experts.{e}.gate_proj.weight"].float()
            * tensors[f"{LAYER}{layer}.mlp.experts.{e}.gate_proj.weight_scale_inv"]
            for e in range(4)
        ])  # fmt: skip
        expected[f"{LAYER}{layer}.mlp.experts.gate_up_proj"][:, :9] = stack.bfloat16()
        shared = f"{LAYER}{layer}.mlp.shared_experts.gate_proj.weight"
        expected[shared] = (tensors[shared].float() * tensors[f"{shared}_scale_inv"]).bfloat16()
    folder = write_checkpoint(tmp_path / "source", tensors)
    config = {
        "quantization_config": {"quant_method": "fp8"},
        "text_config": {"quantization_config": {}, "num_nextn_predict_layers": 1, "dtype": "x"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("old")
    convert(folder, tmp_path / "target", "memory", BIG)
    assert equal(read_folder(tmp_path / "target"), expected)
    written = json.loads((tmp_path / "target/config.json").read_text())
    assert written == {"text_config": {"num_nextn_predict_layers": 1, "dtype": "x"}}
    assert (tmp_path / "target/tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "target/pytorch_model.bin").exists()


def other_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    values, scales = quantize(torch.randn(130, 5))
    stack, factors = (torch.stack([part, part]) for part in quantize(torch.randn(3, 4)))
    return {
        "model.visual.patch_embed.proj.weight": torch.randn(4, 3, 2, 2, 2),
        "model.visual.odd": torch.ones(3, dtype=torch.bfloat16),
        "model.visual.temperature": torch.tensor(3.0),
        f"{LAYER}3.hnorm.weight": torch.ones(4),
        f"{LAYER}3.mlp.experts.down_proj": stack,
        f"{LAYER}3.mlp.experts.down_proj_scale_inv": factors,
        f"{LAYER}3.eh_proj.weight": torch.randn(16, 32, dtype=torch.bfloat16),
        f"{LAYER}3.mlp.experts.0.up_proj.weight": values,
        f"{LAYER}3.mlp.experts.0.up_proj.weight_scale_inv": scales,
    }


def test_vision_and_prediction_are_carried_over(tmp_path: Path) -> None:
    others = other_tensors()
    folder = write_checkpoint(tmp_path / "source", release_tensors() | others)
    line = convert(folder, tmp_path / "target", "release", BIG)
    assert "carried over: 3 vision tensors and 6 prediction (MTP) tensors" in line
    for leaf, rows in (("0.up_proj.weight", 130), ("down_proj", 3)):
        name = f"{LAYER}3.mlp.experts.{leaf}"
        factors = others.pop(f"{name}_scale_inv").repeat_interleave(128, -2)[..., :rows, :]
        others[name] = (others[name].float() * factors).bfloat16()
    assert equal(read_folder(tmp_path / "target"), with_bfloat16(release_tensors()) | others)


def test_text_only_leaves_them_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", release_tensors() | other_tensors())
    (folder / "config.json").write_text('{"text_config": {"num_nextn_predict_layers": 1}}')
    line = convert(folder, tmp_path / "target", "release", BIG, text_only=True)
    assert "left out: 3 vision tensors and 6 prediction (MTP) tensors" in line
    assert equal(read_folder(tmp_path / "target"), with_bfloat16(release_tensors()))
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert config["text_config"]["num_nextn_predict_layers"] == 0


def test_no_more_than_a_few_rows_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads are one run of rows each, and two runs are the most that is held."""
    monkeypatch.setattr(convert_module, "CHUNK_BYTES", 256)
    read, alive = [], []
    real = Slices.read

    def watched(*arguments: object) -> torch.Tensor:
        alive[:] = [reference for reference in alive if not reference.expired()]
        assert len(alive) <= 1, "older rows are still in memory"
        rows = real(*arguments)
        alive.append(StorageWeakRef(rows.untyped_storage()))
        read.append(rows.numel())
        return rows

    monkeypatch.setattr(Slices, "read", watched)
    tensors = release_tensors()
    folder = write_checkpoint(tmp_path / "source", tensors)
    convert(folder, tmp_path / "target", "memory", BIG, torch.float32)
    assert equal(read_folder(tmp_path / "target"), memory_tensors())
    # 64 float32 numbers fit into a run; a single row of a hyper-connection is that wide.
    assert max(read) == 64
    assert sum(read) == sum(tensor.numel() for tensor in tensors.values())


def test_what_cannot_be_converted_is_named_at_once(tmp_path: Path) -> None:
    tensors = release_tensors()
    tensors |= {f"{LAYER}{i}.self_attn.strange": torch.ones(2) for i in range(3)}
    tensors["lm_head.weight"] = torch.ones(2, dtype=torch.int32)
    folder = write_checkpoint(tmp_path / "source", tensors)
    with pytest.raises(ValueError) as raised:
        convert(folder, tmp_path / "target", "release", BIG)
    assert f"{LAYER}{{0-2}}.self_attn.strange: unknown  (3 tensors)" in str(raised.value)
    assert "lm_head.weight: type I32" in str(raised.value)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("damage", ["lost", "misshaped"])
def test_experts_that_cannot_be_stacked_are_refused(tmp_path: Path, damage: str) -> None:
    tensors = release_tensors()
    name = f"{LAYER}1.mlp.experts.2.up_proj.weight"
    tensors[name] = torch.ones(3, 3)
    if damage == "lost":
        del tensors[name]
    folder = write_checkpoint(tmp_path / "source", tensors)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: cannot be made"):
        convert(folder, tmp_path / "target", "memory", BIG)


def test_the_command_reports_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_checkpoint(tmp_path / "source", release_tensors()))
    target = str(tmp_path / "target")
    command = [folder, target, "--layout", "memory", "--max-shard", "4kB", "--dtype", "float32"]
    assert main(command) == 0
    assert f"{len(release_tensors())} tensors of the text model" in capsys.readouterr().out
    assert equal(read_folder(Path(target)), memory_tensors())
    assert main(command) == 1
    assert f"{target}: not empty" in capsys.readouterr().err
    assert main([folder, f"{target}2", "--layout", "memory", "--max-shard", "big"]) == 1
    assert "'big' is not a number of bytes" in capsys.readouterr().err
    full = SimpleNamespace(free=9)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: full)
    assert main([folder, f"{target}3", "--layout", "memory"]) == 1
    assert "GiB of disk" in capsys.readouterr().err


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    entry = Entry("a", (4, 2), torch.float32)

    def parts() -> Iterator[torch.Tensor]:
        yield torch.ones(2, 2)
        assert not path.exists()
        yield torch.ones(2, 2)

    write_file(path, [entry], [parts()])
    assert torch.equal(load_file(path)["a"], torch.ones(4, 2))
    with pytest.raises(ValueError, match="a: 16 bytes came, 32 were announced"):
        write_file(tmp_path / "short.safetensors", [entry], [[torch.ones(2, 2)]])
    assert not (tmp_path / "short.safetensors").exists()


def test_files_hold_no_more_than_asked() -> None:
    entries = [Entry(str(i), (size,), torch.bfloat16) for i, size in enumerate([3, 3, 9, 1, 1, 1])]
    names = [[entry.name for entry in file] for file in shards(entries, 12)]
    assert names == [["0", "1"], ["2"], ["3", "4", "5"]]
