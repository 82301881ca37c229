"""The config.json of an export, as the published one spells it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.models.glm_flash.settings import GlmFlashModel

_PUBLISHED_VOCABULARY = 154_880
_MIXERS = {"kda": "linear_attention", "dsa": "deepseek_sparse_attention"}


def hf_config(settings: "GlmFlashModel", dtype: str) -> dict[str, Any]:
    """Describe a model as the published config.json does.

    The vision tower is the published one, fitted to the model's width: the class that has an
    output head has a vision tower too, and an export holds no weights of it.

    Args:
        settings: a ``GlmFlashModel`` that has passed its check.
        dtype: type of the exported weights ("bfloat16").
    """
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": dtype,
        "tie_word_embeddings": False,
        "image_start_token_id": 154_830,
        "image_end_token_id": 154_831,
        "video_start_token_id": 154_832,
        "video_end_token_id": 154_833,
        "image_token_id": 154_854,
        "video_token_id": 154_855,
        "text_config": _text_config(settings, dtype),
        "vision_config": _vision_config(settings.dim),
    }


def _text_config(settings: "GlmFlashModel", dtype: str) -> dict[str, Any]:
    return {
        "model_type": "glm5_next_text",
        "dtype": dtype,
        "num_hidden_layers": settings.n_layers,
        "hidden_size": settings.dim,
        "vocab_size": settings.vocab_size,
        "max_position_embeddings": settings.max_seq_len,
        "rms_norm_eps": settings.norm_eps,
        "initializer_range": settings.init_std,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        **_special_tokens(settings.vocab_size),
        "layer_types": [_MIXERS[mixer] for mixer in settings.layer_types],
        "linear_attn_config": _linear_attention(settings),
        **_sparse_attention(settings),
        **_feed_forward(settings),
        "mhc": True,
        "hc_mult": settings.hc_mult,
        "hc_sinkhorn_iters": settings.hc_sinkhorn_iters,
        "hc_eps": settings.hc_eps,
    }


def _special_tokens(vocab_size: int) -> dict[str, Any]:
    # These ids are the published tokenizer's; another vocabulary may not even have as many.
    if vocab_size != _PUBLISHED_VOCABULARY:
        return {"pad_token_id": None, "eos_token_id": None}
    return {"pad_token_id": 154_820, "eos_token_id": [154_820, 154_827, 154_829]}


def _linear_attention(settings: "GlmFlashModel") -> dict[str, Any]:
    layers = list(enumerate(settings.layer_types))
    return {
        "num_heads": settings.kda_heads,
        "head_dim": settings.kda_head_dim,
        "short_conv_kernel_size": settings.conv_kernel,
        "gate_lower_bound": settings.gate_lower_bound,
        "kda_layers": [index for index, mixer in layers if mixer == "kda"],
        "full_attn_layers": [index for index, mixer in layers if mixer == "dsa"],
    }


def _sparse_attention(settings: "GlmFlashModel") -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_attention_heads": settings.n_heads,
        "num_key_value_heads": settings.n_heads,
        "q_lora_rank": settings.q_lora_rank,
        "kv_lora_rank": settings.kv_lora_rank,
        "qk_nope_head_dim": settings.qk_head_dim,
        "qk_rope_head_dim": 0,
        "qk_head_dim": settings.qk_head_dim,
        "v_head_dim": settings.v_head_dim,
        "mla_use_nope": True,
        "index_n_heads": settings.index_n_heads,
        "index_head_dim": settings.index_head_dim,
        "index_topk": settings.index_topk,
        "index_kpool": settings.index_kpool,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_types": ["full"] * settings.n_layers,
    }


def _feed_forward(settings: "GlmFlashModel") -> dict[str, Any]:
    dense = settings.n_dense_layers
    sparse = settings.n_layers - dense
    return {
        "intermediate_size": settings.dense_hidden_dim,
        "moe_intermediate_size": settings.expert_hidden_dim,
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * sparse,
        "n_routed_experts": settings.n_experts or 0,
        "n_shared_experts": settings.n_shared_experts,
        "num_experts_per_tok": settings.top_k,
        "n_group": settings.n_expert_groups,
        "topk_group": settings.n_limited_groups,
        "norm_topk_prob": settings.route_norm,
        "routed_scaling_factor": settings.route_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "swiglu_limit": settings.swiglu_limit,
    }


def _vision_config(text_width: int) -> dict[str, Any]:
    return {
        "model_type": "glm5_next_vision",
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "image_size": 448,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": text_width,
        "projection_intermediate_size": 10_240,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 10.0,
    }
