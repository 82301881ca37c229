"""Where the model's parameters and activations are, on torchtitan's meshes.

FSDP2 shards what is replicated here. Over tensor ranks (Korthikanti et al., arXiv 2205.05198):

* Residual streams, mHC and norms hold a part of every sequence's tokens.
* Mixers see all tokens and compute some of the heads. What makes the heads is cut by rows, and no
  tensor holds several of them one after the other, so that a cut by rows is one by heads; the
  output projection is cut by columns, and its outputs are summed and scattered to their tokens.
  Latents, low ranks of gates and the indexer are computed by every rank.
* SwiGLU's inner width is cut, and that of all experts; with expert parallelism whole experts are
  spread instead, and ranks dispatch the tokens that they hold.
* The vocabulary is cut, in the embedding and in the head.

Gradients of replicated parameters are a share of each tensor rank; FSDP2 sums them.
"""

from typing import TYPE_CHECKING

import spmd_types as spmd
from torchtitan.models.common import FeedForward, Linear, RMSNorm
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from components.models.glm_flash.hyper_connections import HyperConnection, MixAffine
from components.models.glm_flash.indexer import Indexer
from components.models.glm_flash.kda import KDA, KdaCore
from components.models.glm_flash.mla import SparseMLA
from components.models.glm_flash.norms import GatedRMSNorm
from components.models.glm_flash.short_conv import ShortConv

if TYPE_CHECKING:
    from components.models.glm_flash.block import GlmFlashBlock
    from components.models.glm_flash.decoder import GlmFlashDecoder

# The parameters that each kind of module holds itself. Names that a module lacks do no harm.
_PARAMETERS: dict[type[Module.Config], tuple[str, ...]] = {
    Linear.Config: ("weight", "bias"),
    RMSNorm.Config: ("weight",),
    LayerNorm.Config: ("weight", "bias"),
    GatedRMSNorm.Config: ("weight",),
    ShortConv.Config: ("weight",),
    KdaCore.Config: ("A_log", "dt_bias"),
    MixAffine.Config: ("base", "scale"),
    HyperConnection.Config: ("fn",),
    Indexer.Config: ("compress_ape", "compress_gate"),
}
_EXPERT_LAYOUT = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}

# Modules of a mixer whose parameters have a row per head, or several.
_BY_HEAD = {
    KDA.Config: (
        "q_proj", "k_proj", "v_proj", "q_conv", "k_conv", "v_conv",
        "f_b_proj", "b_proj", "core", "g_b_proj",
    ),
    SparseMLA.Config: ("q_b_proj", "kv_b_proj"),
}  # fmt: skip


def set_sharding(model: "GlmFlashDecoder.Config", *, expert_parallel: bool) -> None:
    """Give every config that holds parameters, or meets another layout, its placements.

    Parts of mixers and of mHC that have some already keep them.
    """
    set_decoder_sharding_config(model, enable_sp=True)
    for layer in model.layers:
        _set_layer(layer, expert_parallel)
    for _, config, _, _ in model.traverse(Module.Config, recurse=True):
        names = _parameters(config)
        if names:
            _give(config, _placed(names, spmd.R))


def _set_layer(layer: "GlmFlashBlock.Config", expert_parallel: bool) -> None:
    split, whole = dense_sequence_parallel_placement(), dense_activation_placement(tp=spmd.R)
    for kind, names in _BY_HEAD.items():
        if isinstance(layer.attention, kind):
            for name in names:
                config = getattr(layer.attention, name)
                _give(config, _placed(_parameters(config), spmd.S(0)))
    _give(layer.attention.o_proj, _placed(("weight", "bias"), spmd.S(1)))
    layer.attention_norm.sharding_config = norm_config(enable_sp=True)
    layer.attention_norm.sharding_config.out_dst_shardings = whole
    layer.handover.sharding_config = ShardingConfig(
        in_src_shardings={"x": dense_activation_placement(tp=spmd.P)}, in_dst_shardings={"x": split}
    )
    layer.ffn_norm.sharding_config = norm_config(enable_sp=True)
    if layer.feed_forward is not None:
        set_dense_ffn_sharding(layer.feed_forward, attn_x_layout=split, enable_sp=True)
        _sum_outside(layer.feed_forward)
    if layer.moe is not None:
        set_moe_sharding_config(
            layer.moe,
            enable_ep=expert_parallel,
            enable_sp=True,
            expert_param_layout=_EXPERT_LAYOUT,
        )
        if layer.moe.shared_experts is not None:
            _sum_outside(layer.moe.shared_experts)


def _sum_outside(swiglu: FeedForward.Config) -> None:
    """Sum over ranks what the whole SwiGLU returns, not its last product: that may be a piece of
    the tokens, in another shape."""
    swiglu.w2.sharding_config = _placed(("weight", "bias"), spmd.S(1))
    swiglu.sharding_config.out_src_shardings = dense_activation_placement(tp=spmd.P)
    swiglu.sharding_config.out_dst_shardings = dense_sequence_parallel_placement()


def _give(config: Module.Config, sharding: ShardingConfig) -> None:
    if config.sharding_config is None:
        config.sharding_config = sharding


def _parameters(config: Module.Config) -> tuple[str, ...]:
    return sum((n for kind, n in _PARAMETERS.items() if isinstance(config, kind)), ())


def _placed(names: tuple[str, ...], over_tensor_ranks: spmd.PerMeshAxisSpmdType) -> ShardingConfig:
    placement = dense_param_placement(tp=over_tensor_ranks)
    return ShardingConfig(state_shardings=dict.fromkeys(names, placement))
