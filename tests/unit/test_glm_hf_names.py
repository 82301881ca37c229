"""Names of GLM-5.3-Flash's tensors: every layout is recognised, and nothing else is."""

import itertools
import re

import pytest
import torch

from components.models.glm_flash.hf import names
from components.models.glm_flash.hf.fold import fold
from components.models.glm_flash.hf.names import from_native, native_name, parse, release_name
from components.models.glm_flash.hf.plan import Piece, plan
from tests.unit.glm_hf_support import FLOAT32, memory_tensors, native_shapes, release_tensors

LAYER = "model.language_model.layers.7."

# Native name -> published name, written down from the description of the release.
PUBLISHED = {
    "tok_embeddings.weight": "model.language_model.embed_tokens.weight",
    "norm.weight": "model.language_model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "layers.7.attention_norm.weight": f"{LAYER}input_layernorm.weight",
    "layers.7.ffn_norm.weight": f"{LAYER}post_attention_layernorm.weight",
    "layers.7.attention_hc.affine.scale": f"{LAYER}hc_attn_scale",
    "layers.7.ffn_hc.fn": f"{LAYER}hc_ffn_fn",
    "layers.7.attention.k_conv.weight": f"{LAYER}self_attn.k_conv1d.weight",
    "layers.7.attention.core.A_log": f"{LAYER}self_attn.A_log",
    "layers.7.attention.f_a_proj.weight": f"{LAYER}self_attn.f_a_proj.weight",
    "layers.7.attention.kv_a_proj.weight": f"{LAYER}self_attn.kv_a_proj_with_mqa.weight",
    "layers.7.attention.q_a_norm.weight": f"{LAYER}self_attn.q_a_layernorm.weight",
    "layers.7.attention.indexer.compress_ape": (
        f"{LAYER}self_attn.indexer.index_kpool_compress_ape"
    ),
    "layers.7.feed_forward.w2.weight": f"{LAYER}mlp.down_proj.weight",
    "layers.7.moe.expert_bias_E": f"{LAYER}mlp.gate.e_score_correction_bias",
    "layers.7.moe.router.gate.weight": f"{LAYER}mlp.gate.weight",
    "layers.7.moe.shared_experts.w3.weight": f"{LAYER}mlp.shared_experts.up_proj.weight",
    "layers.7.moe.routed_experts.inner_experts.w3_EFD": f"{LAYER}mlp.experts.{{}}.up_proj.weight",
}


@pytest.mark.parametrize(("native", "published"), PUBLISHED.items())
def test_native_tensors_have_their_published_names(native: str, published: str) -> None:
    assert release_name(from_native(native)) == published


def test_names_lead_to_the_release_and_back() -> None:
    for native in native_shapes():
        leaf = from_native(native)
        expert = 3 if names.is_stacked(native) else None
        assert native_name(release_name(leaf, expert)) == (native, expert)


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_every_prefix_means_the_same(prefix: str) -> None:
    leaf = parse(f"{prefix}layers.7.self_attn.forget_gate.A_log")
    assert release_name(leaf) == f"{LAYER}self_attn.A_log"
    assert release_name(parse(f"{prefix}norm.weight")) == "model.language_model.norm.weight"


def test_float32_is_kept_exactly_where_transformers_keeps_it() -> None:
    kept = [name for name in native_shapes() if names.stays_float32(name)]
    assert kept == [name for name in native_shapes() if name.endswith(FLOAT32)]
    # One layer of each kind: two sites' base and scale; A_log, dt_bias and three convolutions.
    assert sum(name.startswith("layers.0.") for name in kept) == 4 + 5
    assert sum(name.startswith("layers.1.") for name in kept) == 4 + 1


def test_both_layouts_hold_the_same_tensors() -> None:
    memory = plan({name: tuple(tensor.shape) for name, tensor in memory_tensors().items()})
    release = release_tensors()
    assert memory.pieces.keys() == release.keys()
    assert all(memory.pieces[name].shape == release[name].shape for name in release)
    assert not memory.unknown and not memory.problems


def test_fused_tensors_are_cut_by_rows() -> None:
    layer = "layers.1."
    found = plan({
        f"{layer}self_attn.conv1d.weight": (36, 1, 4),
        f"{layer}mlp.experts.gate_up_proj": (4, 18, 16),
        f"{layer}mlp.experts.down_proj": (4, 16, 9),
    })  # fmt: skip
    prefix = f"{names.PREFIX}{layer}"
    assert found.pieces[f"{prefix}self_attn.v_conv1d.weight"] == Piece(
        f"{layer}self_attn.conv1d.weight", (12, 1, 4), row=24
    )
    assert found.pieces[f"{prefix}mlp.experts.2.up_proj.weight"] == Piece(
        f"{layer}mlp.experts.gate_up_proj", (9, 16), expert=2, row=9
    )
    assert found.pieces[f"{prefix}mlp.experts.3.down_proj.weight"] == Piece(
        f"{layer}mlp.experts.down_proj", (16, 9), expert=3
    )
    assert len(found.pieces) == 3 + 3 * 4


def test_a_tensor_given_twice_is_a_problem() -> None:
    shape = {"layers.0.self_attn.A_log": (2,), "model.layers.0.self_attn.forget_gate.A_log": (2,)}
    (problem,) = plan(shape).problems
    assert "layers.0.self_attn.A_log" in problem and "forget_gate.A_log" in problem


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [
        ("self_attn.conv1d.weight", (10, 1, 4)),
        ("mlp.experts.gate_up_proj", (4, 9, 16)),
        ("mlp.experts.down_proj", (16, 9)),
    ],
)
def test_a_fused_tensor_that_cannot_be_cut_is_a_problem(leaf: str, shape: tuple) -> None:
    found = plan({f"layers.0.{leaf}": shape})
    assert not found.pieces
    assert f"layers.0.{leaf}" in found.problems[0] and str(list(shape)) in found.problems[0]


def test_the_prediction_layer_is_told_by_its_own_tensors() -> None:
    names_of_layers = {
        "layers.0.input_layernorm.weight": (4,),
        "layers.1.input_layernorm.weight": (4,),
        "layers.2.input_layernorm.weight": (4,),
        "layers.2.eh_proj.weight": (4, 8),
        "layers.2.mlp.experts.0.up_proj.weight": (4, 8),
        "layers.2.mlp.experts.0.up_proj.weight_scale_inv": (1, 1),
    }
    found = plan(names_of_layers)
    assert len(found.pieces) == 2 and len(found.prediction) == 4 and not found.unknown
    # In the middle of the model such a tensor has no business.
    found = plan({**names_of_layers, "layers.3.input_layernorm.weight": (4,)})
    assert found.unknown == ["layers.2.eh_proj.weight"]
    assert not found.prediction


def test_vision_tensors_are_told_by_name_and_strangers_are_not() -> None:
    found = plan({
        "model.visual.blocks.0.mlp.up_proj.weight": (4, 4),
        "visual.patch_embed.proj.bias": (4,),
        "model.language_model.layers.0.self_attn.q_proj.bias": (4,),
        "model.something.weight": (4,),
    })  # fmt: skip
    assert len(found.vision) == 2
    assert found.unknown == [
        "model.language_model.layers.0.self_attn.q_proj.bias",
        "model.something.weight",
    ]


def test_scales_belong_to_their_weight() -> None:
    name = "layers.0.mlp.up_proj.weight"
    assert plan({name: (4, 4), f"{name}_scale_inv": (1, 1)}).pieces[f"{names.PREFIX}{name}"].scaled
    (problem,) = plan({f"{name}_scale_inv": (1, 1)}).problems
    assert f"{name}_scale_inv" in problem


def expand(line: str) -> list[str]:
    """What a folded line stands for."""
    parts = re.split(r"(\{[^}]*\})", line.split("  (")[0])
    choices = []
    for part in parts:
        if not part.startswith("{"):
            choices.append([part])
            continue
        numbers: list[str] = []
        for span in part.strip("{}").split(","):
            first, _, last = span.partition("-")
            numbers += [str(n) for n in range(int(first), int(last or first) + 1)]
        choices.append(numbers)
    return ["".join(choice) for choice in itertools.product(*choices)]


def test_folding_loses_no_name() -> None:
    generator = torch.Generator().manual_seed(0)
    holes = torch.rand(5, 7, generator=generator) < 0.3
    lines = [
        f"layers.{layer}.mlp.experts.{expert}.up_proj.weight: found [1], expected [2]"
        for layer in range(5)
        for expert in range(7)
        if not holes[layer, expert]
    ] + ["norm.weight", "layers.3.norm.weight"]
    folded = fold(lines)
    assert sorted(name for line in folded for name in expand(line)) == sorted(lines)
    assert len(folded) < len(lines)


def test_a_full_grid_folds_into_one_line() -> None:
    lines = [f"layers.{i}.mlp.experts.{e}.up_proj.weight" for i in (3, 4, 6) for e in range(288)]
    expected = "layers.{3-4,6}.mlp.experts.{0-287}.up_proj.weight  (864 tensors)"
    assert fold(lines) == [expected]
