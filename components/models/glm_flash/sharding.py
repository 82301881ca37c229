"""How torchtitan stores the model's parameters: experts over expert ranks, the rest over all."""

from typing import TYPE_CHECKING

import spmd_types as spmd
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.decoder_sharding import (
    dense_param_placement,
    set_decoder_sharding_config,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from components.models.glm_flash.hyper_connections import HyperConnection, MixAffine
from components.models.glm_flash.indexer import Indexer
from components.models.glm_flash.kda import KdaCore
from components.models.glm_flash.norms import GatedRMSNorm
from components.models.glm_flash.short_conv import ShortConv

if TYPE_CHECKING:
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


def set_sharding(model: "GlmFlashDecoder.Config", *, expert_parallel: bool) -> None:
    """Give every config that holds parameters its placement; FSDP2 then shards what is replicated.

    Configs that have one already keep it.
    """
    set_decoder_sharding_config(model, enable_sp=False)
    for layer in model.layers:
        if layer.moe is not None:
            set_moe_sharding_config(
                layer.moe,
                enable_ep=expert_parallel,
                enable_sp=False,
                expert_param_layout=_EXPERT_LAYOUT,
            )
    for _, config, _, _ in model.traverse(Module.Config, recurse=True):
        names = [n for kind, n in _PARAMETERS.items() if isinstance(config, kind)]
        if names and config.sharding_config is None:
            config.sharding_config = _replicated(sum(names, ()))


def _replicated(names: tuple[str, ...]) -> ShardingConfig:
    placement = dense_param_placement(tp=spmd.R)
    return ShardingConfig(state_shardings=dict.fromkeys(names, placement))
