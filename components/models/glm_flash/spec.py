"""Put a ``GlmFlashModel`` together: every width, every initial value."""

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.protocols.model_spec import ModelSpec

from components.models.glm_flash.block import GlmFlashBlock, Handover
from components.models.glm_flash.decoder import GlmFlashDecoder
from components.models.glm_flash.experts import (
    ClampedFeedForward,
    ClampedGroupedExperts,
    ClampedSwiglu,
)
from components.models.glm_flash.hf.adapter import GlmFlashStateDictAdapter
from components.models.glm_flash.hyper_connections import HyperConnection, MixAffine
from components.models.glm_flash.indexer import Indexer, PoolSelector
from components.models.glm_flash.kda import KDA, KdaCore
from components.models.glm_flash.mla import SparseMLA, SparseMlaCore
from components.models.glm_flash.norms import CastFirstRMSNorm, GatedRMSNorm
from components.models.glm_flash.parallelize import parallelize_glm_flash
from components.models.glm_flash.router import UnroundedRouter
from components.models.glm_flash.short_conv import ShortConv
from components.titan.moe import BiasedMoE, UnroundedDispatcher

if TYPE_CHECKING:
    from components.models.glm_flash.settings import GlmFlashModel

# The published model's; not the norm_eps of its RMS norms.
_INDEXER_NORM_EPS = 1e-6


def build_glm_flash_spec(model: "GlmFlashModel") -> ModelSpec:
    """Describe ``model`` for torchtitan's trainer. ``model`` has passed its ``check``."""
    return ModelSpec(
        name="glm_flash",
        flavor=_flavor(model),
        model=_decoder(model),
        parallelize_fn=parallelize_glm_flash,
        pipelining_fn=None,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=partial(GlmFlashStateDictAdapter, settings=model),
    )


def _flavor(model: "GlmFlashModel") -> str:
    size = f"{model.n_layers}x{model.dim}"
    if model.n_experts is None:
        return f"{size}_dense"
    return f"{size}_{model.n_experts}x{model.expert_hidden_dim}_top{model.top_k}"


def _decoder(model: "GlmFlashModel") -> GlmFlashDecoder.Config:
    return GlmFlashDecoder.Config(
        dim=model.dim,
        vocab_size=model.vocab_size,
        streams=model.hc_mult,
        max_context=model.max_seq_len,
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size,
            embedding_dim=model.dim,
            param_init={"weight": _normal(model)},
        ),
        layers=[_layer(model, index) for index in range(model.n_layers)],
        norm=_norm(model, model.dim),
        lm_head=_linear(model, model.dim, model.vocab_size),
    )


def _layer(model: "GlmFlashModel", index: int) -> GlmFlashBlock.Config:
    dense = index < model.n_dense_layers
    return GlmFlashBlock.Config(
        attention_hc=_site(model),
        attention_norm=_norm(model, model.dim),
        attention=_kda(model) if model.layer_types[index] == "kda" else _mla(model),
        handover=Handover.Config(),
        ffn_hc=_site(model),
        ffn_norm=_norm(model, model.dim),
        feed_forward=_swiglu(model, model.dense_hidden_dim) if dense else None,
        moe=None if dense else _moe(model),
    )


def _site(model: "GlmFlashModel") -> HyperConnection.Config:
    return HyperConnection.Config(
        dim=model.dim,
        streams=model.hc_mult,
        sinkhorn_iters=model.hc_sinkhorn_iters,
        eps=model.hc_eps,
        norm_eps=model.norm_eps,
        param_init={"fn": _normal(model)},
        affine=MixAffine.Config(
            streams=model.hc_mult,
            param_init={"base": nn.init.zeros_, "scale": nn.init.ones_},
        ),
    )


def _kda(model: "GlmFlashModel") -> KDA.Config:
    width, rank = model.kda_heads * model.kda_head_dim, model.kda_head_dim
    conv = partial(
        ShortConv.Config,
        channels=width,
        kernel_size=model.conv_kernel,
        param_init={"weight": _normal(model)},
    )
    return KDA.Config(
        head_dim=model.kda_head_dim,
        q_proj=_linear(model, model.dim, width),
        k_proj=_linear(model, model.dim, width),
        v_proj=_linear(model, model.dim, width),
        q_conv=conv(),
        k_conv=conv(),
        v_conv=conv(),
        f_a_proj=_linear(model, model.dim, rank),
        f_b_proj=_linear(model, rank, width),
        b_proj=_linear(model, model.dim, model.kda_heads),
        core=KdaCore.Config(
            heads=model.kda_heads,
            head_dim=model.kda_head_dim,
            lower_bound=model.gate_lower_bound,
            param_init={"A_log": nn.init.zeros_, "dt_bias": _init_dt_bias},
        ),
        g_a_proj=_linear(model, model.dim, rank),
        g_b_proj=_linear(model, rank, width),
        o_norm=GatedRMSNorm.Config(
            normalized_shape=model.kda_head_dim,
            eps=model.norm_eps,
            param_init={"weight": nn.init.ones_},
        ),
        o_proj=_linear(model, width, model.dim),
    )


def _mla(model: "GlmFlashModel") -> SparseMLA.Config:
    heads = model.n_heads
    return SparseMLA.Config(
        head_dim=model.qk_head_dim,
        q_a_proj=_linear(model, model.dim, model.q_lora_rank),
        q_a_norm=_norm(model, model.q_lora_rank),
        q_b_proj=_linear(model, model.q_lora_rank, heads * model.qk_head_dim),
        kv_a_proj=_linear(model, model.dim, model.kv_lora_rank),
        kv_a_norm=_norm(model, model.kv_lora_rank),
        kv_b_proj=_linear(
            model, model.kv_lora_rank, heads * (model.qk_head_dim + model.v_head_dim)
        ),
        o_proj=_linear(model, heads * model.v_head_dim, model.dim),
        indexer=_indexer(model),
        core=SparseMlaCore.Config(
            kpool=model.index_kpool,
            scale=model.qk_head_dim**-0.5,
            chunk_bytes=model.sparse_mla_chunk,
        ),
    )


def _indexer(model: "GlmFlashModel") -> Indexer.Config:
    width = model.index_head_dim
    return Indexer.Config(
        dim=model.dim,
        heads=model.index_n_heads,
        head_dim=width,
        topk=model.index_topk,
        kpool=model.index_kpool,
        wq_b=_linear(model, model.q_lora_rank, model.index_n_heads * width),
        wk=_linear(model, model.dim, width),
        k_norm=LayerNorm.Config(
            normalized_shape=width,
            eps=_INDEXER_NORM_EPS,
            param_init={"weight": nn.init.ones_, "bias": nn.init.zeros_},
        ),
        weights_proj=_linear(model, model.dim, model.index_n_heads),
        selector=PoolSelector.Config(
            topk=model.index_topk, kpool=model.index_kpool, scale=width**-0.5
        ),
        param_init={"compress_ape": nn.init.zeros_, "compress_gate": nn.init.ones_},
    )


def _moe(model: "GlmFlashModel") -> BiasedMoE.Config:
    assert model.n_experts is not None
    grouped = model.n_expert_groups > 1
    shared = model.n_shared_experts * model.expert_hidden_dim
    return BiasedMoE.Config(
        num_experts=model.n_experts,
        router=UnroundedRouter.Config(
            num_experts=model.n_experts,
            gate=_linear(model, model.dim, model.n_experts),
            num_expert_groups=model.n_expert_groups if grouped else None,
            num_limited_groups=model.n_limited_groups if grouped else None,
            top_k=model.top_k,
            score_func="sigmoid",
            route_norm=model.route_norm,
            route_scale=model.route_scale,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=ClampedGroupedExperts.Config(
                dim=model.dim,
                hidden_dim=model.expert_hidden_dim,
                num_experts=model.n_experts,
                activation=ClampedSwiglu.Config(limit=model.swiglu_limit),
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), _normal(model)),
            ),
            token_dispatcher=UnroundedDispatcher.Config(
                num_experts=model.n_experts, top_k=model.top_k
            ),
        ),
        shared_experts=_swiglu(model, shared) if shared else None,
        load_balance_coeff=model.load_balance_coeff or None,
    )


def _swiglu(model: "GlmFlashModel", hidden_dim: int) -> ClampedFeedForward.Config:
    return ClampedFeedForward.Config(
        w1=_linear(model, model.dim, hidden_dim),
        w2=_linear(model, hidden_dim, model.dim),
        w3=_linear(model, model.dim, hidden_dim),
        activation=ClampedSwiglu.Config(limit=model.swiglu_limit),
    )


def _linear(model: "GlmFlashModel", in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(
        in_features=in_features, out_features=out_features, param_init={"weight": _normal(model)}
    )


def _norm(model: "GlmFlashModel", width: int) -> CastFirstRMSNorm.Config:
    return CastFirstRMSNorm.Config(
        normalized_shape=width, eps=model.norm_eps, param_init={"weight": nn.init.ones_}
    )


def _normal(model: "GlmFlashModel") -> partial:
    return partial(nn.init.normal_, std=model.init_std)


@torch.no_grad()
def _init_dt_bias(parameter: torch.Tensor) -> None:
    """The inverse softplus of a step size, log-uniform between 0.001 and 0.1.

    As in Mamba, arXiv 2312.00752, section 3.6.
    """
    nn.init.uniform_(parameter, math.log(1e-3), math.log(1e-1))
    step = parameter.exp()
    parameter.copy_(step + torch.log(-torch.expm1(-step)))
