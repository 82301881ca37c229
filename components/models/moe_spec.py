"""Put an ``MoEModel`` together from torchtitan's parts."""

from functools import partial
from typing import TYPE_CHECKING

import torch.nn as nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.config import derive
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import Embedding, FeedForward, Linear, RMSNorm
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec

from components.models.position import build_rope
from components.titan.position import AlibiAttention

if TYPE_CHECKING:
    from components.models.moe import MoEModel


def build_moe_spec(model: "MoEModel") -> ModelSpec:
    """Describe ``model`` for torchtitan's trainer. ``model`` has passed its ``check``.

    The description reports FLOPs the way torchtitan does: attention is counted as if it were not
    causal, 12 x n_layers x n_heads x head_dim x sequence length per token, forward and backward.
    """
    return ModelSpec(
        name="moe",
        flavor=f"{model.n_layers}x{model.dim}_{model.n_experts}x{model.expert_hidden_dim}"
        f"_top{model.top_k}",
        model=_decoder(model),
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=None,
    )


def _decoder(model: "MoEModel") -> Qwen3Model.Config:
    embedding_init = skip_param_init if model.tie_embeddings else _normal(model)
    return Qwen3Model.Config(
        dim=model.dim,
        vocab_size=model.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size,
            embedding_dim=model.dim,
            param_init={"weight": embedding_init},
        ),
        layers=[_layer(model, index) for index in range(model.n_layers)],
        norm=_norm(model, model.dim),
        lm_head=_linear(model, model.dim, model.vocab_size),
        enable_weight_tying=model.tie_embeddings,
    )


def _layer(model: "MoEModel", index: int) -> Qwen3TransformerBlock.Config:
    dense_hidden = model.dense_hidden_dim if index < model.n_dense_layers else None
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(model, model.dim),
        attention=_attention(model),
        ffn_norm=_norm(model, model.dim),
        feed_forward=None if dense_hidden is None else _swiglu(model, dense_hidden),
        moe=_moe(model) if dense_hidden is None else None,
    )


def _attention(model: "MoEModel") -> GQAttention.Config:
    attention = make_gqa_config(
        dim=model.dim,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        wqkv_param_init={"weight": _normal(model)},
        wo_param_init={"weight": _residual_normal(model)},
        inner_attention=get_attention_config(model.inner_attention),
        fuse_qkv=True,
        rope=build_rope(
            model.position,
            dim=model.head_dim,
            max_seq_len=model.max_seq_len,
            theta=model.rope_theta,
            n_heads=model.n_heads,
        ),
        qk_norm=_norm(model, model.head_dim) if model.qk_norm else None,
    )
    alibi = model.position.kind == "alibi"
    return derive(attention, AlibiAttention.Config) if alibi else attention


def _moe(model: "MoEModel") -> MoE.Config:
    shared_hidden = model.n_shared_experts * model.expert_hidden_dim
    return make_moe_config(
        num_experts=model.n_experts,
        router=make_router_config(
            dim=model.dim,
            num_experts=model.n_experts,
            gate_param_init={"weight": _normal(model)},
            top_k=model.top_k,
            score_func=model.score_func,
            route_norm=model.route_norm,
            route_scale=model.route_scale,
        ),
        routed_experts=make_routed_experts_config(
            dim=model.dim,
            hidden_dim=model.expert_hidden_dim,
            num_experts=model.n_experts,
            top_k=model.top_k,
            param_init={
                "w1_EFD": _normal(model),
                "w2_EDF": _residual_normal(model),
                "w3_EFD": _normal(model),
            },
            comm_backend=model.comm_backend,
        ),
        shared_experts=_swiglu(model, shared_hidden) if shared_hidden else None,
        load_balance_coeff=model.load_balance_coeff,
    )


def _swiglu(model: "MoEModel", hidden_dim: int) -> FeedForward.Config:
    return FeedForward.Config(
        w1=_linear(model, model.dim, hidden_dim),
        w2=Linear.Config(
            in_features=hidden_dim,
            out_features=model.dim,
            param_init={"weight": _residual_normal(model)},
        ),
        w3=_linear(model, model.dim, hidden_dim),
    )


def _linear(model: "MoEModel", in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(
        in_features=in_features, out_features=out_features, param_init={"weight": _normal(model)}
    )


def _norm(model: "MoEModel", width: int) -> RMSNorm.Config:
    return RMSNorm.Config(
        normalized_shape=width, eps=model.norm_eps, param_init={"weight": nn.init.ones_}
    )


def _normal(model: "MoEModel") -> partial:
    return partial(nn.init.normal_, std=model.init_std)


def _residual_normal(model: "MoEModel") -> partial:
    # 2 x n_layers projections add into the residual stream; this keeps their sum at init_std.
    return partial(nn.init.normal_, std=model.init_std / (2 * model.n_layers) ** 0.5)
