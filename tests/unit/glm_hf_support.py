"""A tiny GLM-5.3-Flash in checkpoint form: native tensors, settings, and files in every layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from components.models.glm_flash.hf.adapter import GlmFlashStateDictAdapter

LAYERS, EXPERTS, WIDTH, VOCABULARY = 3, 4, 16, 11
SETTINGS = SimpleNamespace(
    n_layers=LAYERS, dim=WIDTH, vocab_size=VOCABULARY, max_seq_len=64,
    layer_types=["kda", "dsa", "kda"], kda_heads=2, kda_head_dim=6, conv_kernel=4,
    gate_lower_bound=-5.0, n_heads=2, q_lora_rank=10, kv_lora_rank=14, qk_head_dim=8, v_head_dim=12,
    index_n_heads=2, index_head_dim=5, index_topk=8, index_kpool=4, n_dense_layers=1,
    dense_hidden_dim=24, n_experts=EXPERTS, top_k=2, expert_hidden_dim=9, n_shared_experts=1,
    n_expert_groups=1, n_limited_groups=1, route_norm=True, route_scale=2.5, swiglu_limit=10.0,
    hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, norm_eps=1e-5, init_std=0.02,
)  # fmt: skip
"""What ``GlmFlashModel`` would hold."""

_SITE = {"fn": (24, 4 * WIDTH), "affine.base": (24,), "affine.scale": (3,)}
_KDA = {
    **{f"{name}_proj.weight": (12, WIDTH) for name in "qkv"},
    **{f"{name}_conv.weight": (12, 1, 4) for name in "qkv"},
    "b_proj.weight": (2, WIDTH),
    "f_a_proj.weight": (6, WIDTH),
    "f_b_proj.weight": (12, 6),
    "g_a_proj.weight": (6, WIDTH),
    "g_b_proj.weight": (12, 6),
    "o_proj.weight": (WIDTH, 12),
    "core.A_log": (2,),
    "core.dt_bias": (12,),
    "o_norm.weight": (6,),
}
_DSA = {
    "q_a_proj.weight": (10, WIDTH),
    "q_a_norm.weight": (10,),
    "q_b_proj.weight": (16, 10),
    "kv_a_proj.weight": (14, WIDTH),
    "kv_a_norm.weight": (14,),
    "kv_b_proj.weight": (40, 14),
    "o_proj.weight": (WIDTH, 24),
    "indexer.wq_b.weight": (10, 10),
    "indexer.wk.weight": (5, WIDTH),
    "indexer.weights_proj.weight": (2, WIDTH),
    "indexer.k_norm.weight": (5,),
    "indexer.k_norm.bias": (5,),
    "indexer.compress_ape": (4, 5),
    "indexer.compress_gate": (5, WIDTH),
}
_DENSE = {"w1.weight": (24, WIDTH), "w2.weight": (WIDTH, 24), "w3.weight": (24, WIDTH)}
_SHARED = {"w1.weight": (9, WIDTH), "w2.weight": (WIDTH, 9), "w3.weight": (9, WIDTH)}
_MOE = {
    "router.gate.weight": (EXPERTS, WIDTH),
    "expert_bias_E": (EXPERTS,),
    "routed_experts.inner_experts.w1_EFD": (EXPERTS, 9, WIDTH),
    "routed_experts.inner_experts.w2_EDF": (EXPERTS, WIDTH, 9),
    "routed_experts.inner_experts.w3_EFD": (EXPERTS, 9, WIDTH),
    **{f"shared_experts.{name}": shape for name, shape in _SHARED.items()},
}
FLOAT32 = ("A_log", "dt_bias", "_conv.weight", "affine.base", "affine.scale", "expert_bias_E")


def native_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the tiny model."""
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (VOCABULARY, WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    for index, mixer in enumerate(SETTINGS.layer_types):
        parts = {
            "attention": _KDA if mixer == "kda" else _DSA,
            **({"feed_forward": _DENSE} if index == 0 else {"moe": _MOE}),
            "attention_hc": _SITE,
            "ffn_hc": _SITE,
            "attention_norm": {"weight": (WIDTH,)},
            "ffn_norm": {"weight": (WIDTH,)},
        }
        for part, names in parts.items():
            shapes |= {f"layers.{index}.{part}.{name}": shape for name, shape in names.items()}
    return shapes


def native_tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random values, exact in bfloat16; what stays in float32 is not rounded."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in native_shapes().items():
        tensor = torch.randn(shape, generator=generator)
        if not name.endswith(FLOAT32):
            tensor = tensor.to(torch.bfloat16).to(dtype)
        tensors[name] = tensor
    return tensors


def new_adapter() -> GlmFlashStateDictAdapter:
    return GlmFlashStateDictAdapter(SimpleNamespace(), None, settings=SETTINGS)


def release_tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tiny model under release names, one tensor per expert."""
    return dict(new_adapter().to_hf(native_tensors(dtype, seed)))


def memory_tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tiny model as transformers holds it; written without the package under test."""
    tensors: dict[str, torch.Tensor] = {}
    release = release_tensors(seed, dtype)
    for name, tensor in release.items():
        if ".experts." in name or "_conv1d" in name:
            continue
        for site in ("attn", "ffn"):
            name = name.replace(f"hc_{site}_", f"{site}_hc.")
        for part in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        tensors[name] = tensor
    for index, mixer in enumerate(SETTINGS.layer_types):
        layer = f"model.language_model.layers.{index}."
        if mixer == "kda":
            parts = [release[f"{layer}self_attn.{name}_conv1d.weight"] for name in "qkv"]
            tensors[f"{layer}self_attn.conv1d.weight"] = torch.cat(parts)
        if index == 0:
            continue
        stacks = {
            part: torch.stack(
                [release[f"{layer}mlp.experts.{i}.{part}.weight"] for i in range(EXPERTS)]
            )
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = torch.cat([stacks["gate_proj"], stacks["up_proj"]], dim=1)
        tensors[f"{layer}mlp.experts.gate_up_proj"] = gate_up
        tensors[f"{layer}mlp.experts.down_proj"] = stacks["down_proj"]
    return tensors


def write_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], files: int = 1, index: bool = True
) -> Path:
    """Spread tensors over files in turn, the way no sensible layout would."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(tensors.items())[number::files])
        save_file({key: value.contiguous() for key, value in part.items()}, folder / name)
        weight_map |= dict.fromkeys(part, name)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Any float8 values and scales of the shapes that a weight (rows, columns) has."""
    rows, columns = weight.shape
    scales = 0.5 + torch.rand(-(-rows // 128), -(-columns // 128))
    return weight.to(torch.float8_e4m3fn), scales


def equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two dictionaries hold the same names, types and bits."""
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    return all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )
