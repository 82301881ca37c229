"""Models that several tests build."""

from typing import Any

from components.models.glm_flash.settings import GlmFlashModel
from components.models.moe import MoEModel


def tiny_moe(**changes: Any) -> MoEModel:
    """Two layers of width 64, 4 experts of width 64, top-2: the settings of conf moe_debug."""
    settings: dict[str, Any] = {
        "n_layers": 2,
        "dim": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "n_experts": 4,
        "top_k": 2,
        "expert_hidden_dim": 64,
        "vocab_size": 320,
        "max_seq_len": 8192,
    }
    return MoEModel(**(settings | changes))


def big_moe(**changes: Any) -> MoEModel:
    """The widths of the MoE family (conf moe_120b and deeper). For the meta device only."""
    settings: dict[str, Any] = {
        "n_layers": 7,
        "dim": 7168,
        "n_heads": 56,
        "n_kv_heads": 8,
        "head_dim": 128,
        "n_experts": 384,
        "top_k": 8,
        "expert_hidden_dim": 2048,
        "vocab_size": 200_000,
        "max_seq_len": 2**20,
    }
    return MoEModel(**(settings | changes))


def tiny_glm(**changes: Any) -> GlmFlashModel:
    """Three KDA layers and a DSA one of width 128, 8 experts, top-2: conf glm_flash_tiny."""
    settings: dict[str, Any] = {
        "n_layers": 4,
        "dim": 128,
        "layer_types": ["kda", "kda", "kda", "dsa"],
        "vocab_size": 320,
        "max_seq_len": 32_768,
        "kda_heads": 4,
        "kda_head_dim": 32,
        "n_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_head_dim": 32,
        "v_head_dim": 32,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 128,
        "n_dense_layers": 1,
        "dense_hidden_dim": 256,
        "n_experts": 8,
        "top_k": 2,
        "expert_hidden_dim": 128,
        "load_balance_coeff": 0.01,
    }
    return GlmFlashModel(**(settings | changes))
