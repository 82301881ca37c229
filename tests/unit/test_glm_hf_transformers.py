"""Checkpoints of transformers' GLM-5.3-Flash: read, trained elsewhere, exported, read back."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    Glm5NextTextConfig,
)

from components.models.glm_flash.hf.adapter import GlmFlashStateDictAdapter  # noqa: E402
from components.models.glm_flash.hf.config import hf_config  # noqa: E402
from components.models.glm_flash.hf.convert import convert  # noqa: E402
from components.models.glm_flash.settings import GlmFlashModel  # noqa: E402
from components.titan.checkpoint import RunCheckpoints  # noqa: E402
from tests.glm_flash.oracle import TINY, UNEVEN, native_tensors, settings_of  # noqa: E402
from tests.unit.glm_hf_support import equal  # noqa: E402

VISION = dict(
    depth=1, hidden_size=16, num_heads=2, intermediate_size=16, image_size=28,
    out_hidden_size=64, projection_intermediate_size=16,
)  # fmt: skip
# Endings, in transformers' spelling, of what it keeps in float32.
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "hc.base", "hc.scale", "e_score_correction_bias")


def new_model() -> Glm5NextForConditionalGeneration:
    """In bfloat16, with what transformers keeps in float32 in float32; every value random."""
    config = Glm5NextConfig(text_config=TINY, vision_config=VISION)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = Glm5NextForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            random = torch.randn(tensor.shape) * 0.3 + (1.0 if "norm.weight" in name else 0.0)
            tensor.data = random if name.endswith(FLOAT32) else random.bfloat16()
    return model


@pytest.fixture(scope="module")
def model() -> Glm5NextForConditionalGeneration:
    return new_model()


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as transformers publishes it."""
    folder = tmp_path_factory.mktemp("release")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def text_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The text model's tensors by native name, through a name table of the tests' own."""
    tensors = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in model.state_dict().items()
        if ".visual." not in name
    }
    return native_tensors(tensors)


def adapter_of(model: Any) -> GlmFlashStateDictAdapter:
    settings = GlmFlashModel(**settings_of(model.config.text_config))
    return GlmFlashStateDictAdapter(SimpleNamespace(), None, settings=settings)


def load(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    adapter = adapter_of(model)
    target = {name: torch.empty_like(tensor) for name, tensor in text_tensors(model).items()}
    states = adapter.to_hf(target)
    dcp.load(states, storage_reader=adapter.get_hf_storage_reader(str(folder)))
    return adapter.from_hf(states)


def test_the_files_of_transformers_are_in_the_release_layout(model: Any, saved: Path) -> None:
    stored = load_file(saved / "model.safetensors")
    text = {name: t for name, t in stored.items() if not name.startswith("model.visual.")}
    assert equal(text, dict(adapter_of(model).to_hf(text_tensors(model))))
    # Names as described, a sample of each kind.
    layer = "model.language_model.layers."
    assert {
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        f"{layer}0.hc_attn_fn",
        f"{layer}0.self_attn.q_conv1d.weight",
        f"{layer}0.self_attn.dt_bias",
        f"{layer}1.mlp.experts.7.gate_proj.weight",
        f"{layer}1.mlp.gate.e_score_correction_bias",
        f"{layer}3.self_attn.indexer.index_kpool_compress_ape",
    } <= text.keys()
    assert len(text) < len(stored)


@pytest.mark.parametrize("form", ["release", "memory", "text_model", "converted"])
def test_loading_gives_the_native_tensors_bit_by_bit(
    model: Any, saved: Path, tmp_path: Path, form: str
) -> None:
    folder = tmp_path / form
    if form == "release":
        folder = saved
    elif form == "memory":
        model.save_pretrained(folder, save_original_format=False)
    elif form == "converted":
        convert(saved, folder, "memory", 100_000, text_only=True)
    else:
        model.model.language_model.save_pretrained(folder)
        # The text model alone has no output head; it goes into a file of its own.
        save_file({"lm_head.weight": model.lm_head.weight}, folder / "head.safetensors")
    assert equal(load(folder, model), text_tensors(model))


def test_a_checkpoint_of_transformers_gives_its_logits(tmp_path: Path) -> None:
    reference = new_model().float()
    reference.save_pretrained(tmp_path)
    settings = GlmFlashModel(**settings_of(reference.config.text_config))
    native = settings.build_spec().model.build()
    native.init_states()
    adapter = adapter_of(reference)
    states = adapter.to_hf(native.state_dict())
    dcp.load(states, storage_reader=adapter.get_hf_storage_reader(str(tmp_path)))

    tokens = torch.randint(1, 97, (1, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = native(tokens, positions=torch.arange(21).unsqueeze(0)).squeeze(0)
        expected = reference(tokens).logits.squeeze(0)
    assert (found - expected).norm() < 2e-5 * expected.norm()


@pytest.mark.parametrize("layout", ["release", "memory"])
def test_transformers_loads_what_was_converted(
    model: Any, saved: Path, tmp_path: Path, layout: str
) -> None:
    convert(saved, tmp_path / layout, layout, 100_000)
    loaded = Glm5NextForConditionalGeneration.from_pretrained(tmp_path / layout, dtype="auto")
    assert equal(loaded.state_dict(), model.state_dict())


class Holder(nn.Module):
    """A module with the given tensors as its state."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            home: nn.Module = self
            for part in path.split(".") if path else []:
                if not hasattr(home, part):
                    home.add_module(part, nn.Module())
                home = getattr(home, part)
            home.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def checkpoints(folder: Path, module: nn.Module, model: Any, **config: Any) -> RunCheckpoints:
    return RunCheckpoints.Config(**config).build(
        dataloader=None,
        model_parts=[module],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=adapter_of(model),
        base_folder=str(folder),
    )


def shrink_vision(folder: Path) -> None:
    """Make the vision tower, of which an export has no weights, as small as the tests'."""
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= VISION
    (folder / "config.json").write_text(json.dumps(config))


def test_an_export_is_the_checkpoint_it_came_from(
    model: Any, saved: Path, tmp_path: Path, one_rank: None
) -> None:
    """Loaded into float32, exported in bfloat16 at a run's end, opened by transformers."""
    whole = {name: torch.zeros_like(t).float() for name, t in text_tensors(model).items()}
    module = Holder(whole)
    manager = checkpoints(
        tmp_path, module, model, initial_load_path=str(saved), initial_load_in_hf=True,
        initial_load_model_only=True, last_save_in_hf=True, last_save_model_only=True,
        export_dtype="bfloat16", keep_latest_k=0,
    )  # fmt: skip
    assert manager.load()
    manager.save(7, last_step=True)
    manager.close()

    folder = tmp_path / "checkpoint/step-7"
    exported: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        exported |= load_file(file)
    source = load_file(saved / "model.safetensors")
    assert equal(exported, {n: t for n, t in source.items() if not n.startswith("model.visual.")})
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors.index.json"} < names and "sharded" not in names

    shrink_vision(folder)
    again = Glm5NextForConditionalGeneration.from_pretrained(
        folder, dtype="auto", attn_implementation="eager"
    ).eval()
    assert equal(text_tensors(again), text_tensors(model))
    tokens = torch.randint(1, 97, (1, 21))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_resumable_checkpoint_keeps_its_types(model: Any, tmp_path: Path, one_rank: None) -> None:
    manager = checkpoints(
        tmp_path, Holder(text_tensors(model)), model, last_save_model_only=True,
        export_dtype="bfloat16", keep_latest_k=0,
    )  # fmt: skip
    manager.save(3, last_step=True)
    manager.close()
    stored = dcp.FileSystemReader(tmp_path / "checkpoint/step-3").read_metadata()
    found = {name: entry.properties.dtype for name, entry in stored.state_dict_metadata.items()}
    assert found == {name: tensor.dtype for name, tensor in text_tensors(model).items()}


@pytest.mark.parametrize("changes", [{}, UNEVEN | {"n_group": 4, "topk_group": 2}])
def test_the_written_config_describes_the_same_model(tmp_path: Path, changes: dict) -> None:
    config = Glm5NextTextConfig(**(TINY | {"norm_topk_prob": not changes} | changes))
    settings = GlmFlashModel(**settings_of(config))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(settings, "bfloat16")))
    read = Glm5NextConfig.from_pretrained(tmp_path)
    expected, found = config.to_dict(), read.text_config.to_dict()
    # What the weights do not depend on.
    ignored = {"dtype", "use_cache", "pad_token_id"}
    assert {n: v for n, v in expected.items() if found.get(n) != v and n not in ignored} == {}
    assert read.architectures == ["Glm5NextForConditionalGeneration"]
    assert read.vision_config.out_hidden_size == config.hidden_size


def test_the_published_config_is_written_for_the_published_model() -> None:
    text = hf_config(GlmFlashModel(), "bfloat16")["text_config"]
    assert text["layer_types"].count("deepseek_sparse_attention") == 11
    assert text["linear_attn_config"]["full_attn_layers"] == list(range(3, 45, 4))
    assert text["mlp_layer_types"] == ["dense"] * 3 + ["sparse"] * 42
    assert (text["index_kpool"], text["pad_token_id"]) == (4, 154_820)
    # In HF's spelling as well: every field of its class that differs is one it does not need.
    read = Glm5NextTextConfig(**text)
    default = Glm5NextTextConfig(index_kpool=4).to_dict()
    differing = {n for n, v in default.items() if getattr(read, n, None) != v}
    assert differing <= {"dtype", "eos_token_id", "transformers_version"}
