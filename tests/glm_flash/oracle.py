"""Tiny randomised GLM-5.3-Flash models of transformers: what the native model is measured against.

The name table here is written by hand and on purpose knows nothing of the model's own checkpoint
adapter: two independent readings of the names check each other.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from transformers import Glm5NextTextConfig
from transformers.models.glm5_next import modeling_glm5_next as modeling
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

# transformers prefers the kernels of packages that happen to be installed, even where they cannot
# run; an oracle computes in plain torch.
for _kernel in ("chunk_kimi_delta_attention", "causal_conv1d_fn"):
    setattr(modeling, _kernel, inspect.unwrap(getattr(modeling, _kernel)))

TINY: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_rope_head_dim=0,
    qk_nope_head_dim=16,
    v_head_dim=16,
    # Fewer heads let whole rows of scores be exactly zero, and ties have no defined order there.
    index_n_heads=16,
    index_head_dim=16,
    index_topk=8,
    index_kpool=4,
    index_kpool_always_select_tail=True,
    indexer_types=["full"] * 4,
    layer_types=["linear_attention"] * 3 + ["deepseek_sparse_attention"],
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    linear_num_heads=4,
    linear_head_dim=16,
    linear_conv_kernel_dim=4,
    linear_lower_bound=-5.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-5,
    swiglu_limit=10.0,
    max_position_embeddings=4096,
    pad_token_id=0,
    tie_word_embeddings=False,
    use_cache=False,
)

# No two widths that may differ are equal, so a transposed or swapped matrix cannot go unnoticed.
UNEVEN: dict[str, Any] = dict(
    hidden_size=48,
    intermediate_size=80,
    moe_intermediate_size=24,
    n_shared_experts=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    num_experts_per_tok=3,
    q_lora_rank=40,
    kv_lora_rank=56,
    qk_nope_head_dim=16,
    v_head_dim=24,
    index_n_heads=20,
    index_head_dim=32,
    index_topk=12,
    index_kpool=2,
    linear_num_heads=5,
    linear_head_dim=8,
    linear_conv_kernel_dim=3,
    linear_lower_bound=-2.0,
    hc_mult=3,
    hc_sinkhorn_iters=7,
    hc_eps=1e-4,
    rms_norm_eps=1e-3,
    routed_scaling_factor=1.5,
)

# One tensor there, one here. "layers.N." comes before both.
_BLOCK_NAMES = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "attention_hc.fn",
    "attn_hc.base": "attention_hc.affine.base",
    "attn_hc.scale": "attention_hc.affine.scale",
    "ffn_hc.fn": "ffn_hc.fn",
    "ffn_hc.base": "ffn_hc.affine.base",
    "ffn_hc.scale": "ffn_hc.affine.scale",
    "self_attn.forget_gate.A_log": "attention.core.A_log",
    "self_attn.forget_gate.dt_bias": "attention.core.dt_bias",
    "self_attn.forget_gate.f_a_proj.weight": "attention.f_a_proj.weight",
    "self_attn.forget_gate.f_b_proj.weight": "attention.f_b_proj.weight",
    "self_attn.q_a_layernorm.weight": "attention.q_a_norm.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.kv_a_proj.weight",
    "self_attn.kv_a_layernorm.weight": "attention.kv_a_norm.weight",
    "self_attn.indexer.index_kpool_compress_ape": "attention.indexer.compress_ape",
    "self_attn.indexer.index_kpool_compress_gate": "attention.indexer.compress_gate",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "mlp.experts.down_proj": "moe.routed_experts.inner_experts.w2_EDF",
    "mlp.shared_experts.gate_proj.weight": "moe.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "moe.shared_experts.w3.weight",
}
_SAME_IN_ATTENTION = (
    *(f"{name}_proj.weight" for name in ("q", "k", "v", "b", "o", "g_a", "g_b")),
    *(f"{name}_proj.weight" for name in ("q_a", "q_b", "kv_b")),
    *(f"indexer.{name}.weight" for name in ("wq_b", "wk", "weights_proj", "k_norm")),
    "indexer.k_norm.bias",
    "o_norm.weight",
)
_BLOCK_NAMES |= {f"self_attn.{name}": f"attention.{name}" for name in _SAME_IN_ATTENTION}

_TOP_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
# One tensor there, several here: cut into equal parts along a dimension.
_CUT_NAMES = {
    "self_attn.conv1d.weight": (0, [f"attention.{name}_conv.weight" for name in "qkv"]),
    "mlp.experts.gate_up_proj": (
        1,
        [f"moe.routed_experts.inner_experts.{name}_EFD" for name in ("w1", "w3")],
    ),
}


class Reference(nn.Module):
    """transformers' text model and an output head, which transformers leaves to its callers."""

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__()
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def config(self) -> Glm5NextTextConfig:
        return self.model.config

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states ``[B, L, dim]`` and logits ``[B, L, vocabulary]``.

        A row of ``tokens`` int64 ``[B, L]`` is one document: there is no packing here.
        """
        is_double = self.lm_head.weight.dtype == torch.float64
        with _float64_for_float32() if is_double else nullcontext():
            hidden = self.model(input_ids=tokens).last_hidden_state
        return hidden, self.lm_head(hidden)

    def double(self) -> "Reference":
        """In float64 throughout, where rounding is far too small to hide or to fake a mistake."""
        # The grouped matrix product that computes the experts otherwise knows no float64.
        self.config._experts_implementation = "eager"
        return super().double()


@contextmanager
def _float64_for_float32() -> Iterator[None]:
    """transformers casts to float32 at many places, whatever the model's dtype: not here."""
    to_float32 = torch.Tensor.float
    modeling.torch = SimpleNamespace(**vars(torch) | {"float32": torch.float64})
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        modeling.torch = torch
        torch.Tensor.float = to_float32


def build_reference(seed: int = 0, **changes: Any) -> Reference:
    """A randomised model in float32, on the CPU. ``changes`` are of transformers' config keys.

    Values that initialisation leaves neutral (0 or 1) would hide mistakes, so all are random.
    """
    config = Glm5NextTextConfig(**(TINY | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    reference = Reference(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            center, spread = _distribution(name, parameter)
            parameter.copy_(center + spread * torch.randn(parameter.shape, generator=generator))
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return reference


_DISTRIBUTIONS = (
    (("A_log", "base", "compress_ape"), 0.0, 0.5),
    (("dt_bias",), 0.0, 1.0),
    ((".scale",), 1.0, 0.3),
    ((".fn",), 0.0, 0.1),
    (("norm.weight",), 1.0, 0.2),
    (("norm.bias",), 0.0, 0.2),
    (("compress_gate",), 0.0, 0.3),
)


def _distribution(name: str, parameter: torch.Tensor) -> tuple[float, float]:
    for endings, center, spread in _DISTRIBUTIONS:
        if name.endswith(endings):
            return center, spread
    return 0.0, 1.5 / parameter.shape[-1] ** 0.5


def settings_of(config: Glm5NextTextConfig) -> dict[str, Any]:
    """What ``GlmFlashModel`` is given to describe the same model."""
    mixers = {"linear_attention": "kda", "indexed_attention": "dsa"}
    dense = [kind == "dense" for kind in config.mlp_layer_types]
    assert dense == sorted(dense, reverse=True), "dense layers come first"
    return {
        "n_layers": config.num_hidden_layers,
        "dim": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_seq_len": config.max_position_embeddings,
        "layer_types": [mixers[kind] for kind in config.layer_types],
        "kda_heads": config.linear_num_heads,
        "kda_head_dim": config.linear_head_dim,
        "conv_kernel": config.linear_conv_kernel_dim,
        "gate_lower_bound": config.linear_lower_bound,
        "n_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "v_head_dim": config.v_head_dim,
        "index_n_heads": config.index_n_heads,
        "index_head_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "index_kpool": config.index_kpool,
        "n_dense_layers": sum(dense),
        "dense_hidden_dim": config.intermediate_size,
        "n_experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "expert_hidden_dim": config.moe_intermediate_size,
        "n_shared_experts": config.n_shared_experts,
        "n_expert_groups": config.n_group,
        "n_limited_groups": config.topk_group,
        "route_norm": config.norm_topk_prob,
        "route_scale": config.routed_scaling_factor,
        "swiglu_limit": config.swiglu_limit,
        "load_balance_coeff": 0.0,
        "hc_mult": config.hc_mult,
        "hc_sinkhorn_iters": config.hc_sinkhorn_iters,
        "hc_eps": config.hc_eps,
        "norm_eps": config.rms_norm_eps,
        "init_std": config.initializer_range,
        "kda_kernel": "reference",
    }


def native_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename and cut tensors (values or gradients) of a ``Reference`` to the native model's.

    Raises:
        KeyError: a name has no place in the native model.
    """
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name in _TOP_NAMES:
            renamed[_TOP_NAMES[name]] = tensor
            continue
        _, _, layer, inner = name.split(".", 3)
        if inner in _CUT_NAMES:
            dim, parts = _CUT_NAMES[inner]
            pieces = zip(parts, tensor.chunk(len(parts), dim), strict=True)
            renamed |= {f"layers.{layer}.{part}": piece for part, piece in pieces}
        else:
            renamed[f"layers.{layer}.{_BLOCK_NAMES[inner]}"] = tensor
    return renamed


def load_into(native: nn.Module, reference: Reference) -> None:
    """Copy every value of ``reference``; each keeps the native model's dtype.

    Raises:
        AssertionError: the two models do not hold the same names and shapes.
    """
    source = native_tensors(reference.state_dict())
    target = native.state_dict()
    assert target.keys() == source.keys(), sorted(target.keys() ^ source.keys())
    with torch.no_grad():
        for name, tensor in target.items():
            assert tensor.shape == source[name].shape, (name, tensor.shape, source[name].shape)
            tensor.copy_(source[name])


def grads_of(reference: Reference) -> dict[str, torch.Tensor]:
    """Gradients by native name; parameters without one (the indexer's) are absent."""
    grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    return native_tensors(grads)
