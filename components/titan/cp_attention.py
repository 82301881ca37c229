"""torchtitan's softmax attentions on this rank's share of a batch.

Only the inner attention is replaced: projections, norms, the rotary embedding (with positions
within documents) and sinks work token by token. In place of a mask it is given a ``Share``. It is
no ``FlexAttention``: torchtitan's trainer would build that a mask of the whole batch.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torchtitan.config import derive
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import BaseAttention, GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.gpt_oss.model import Attention as SinkAttention
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from components.context_parallel.share import Share
from components.context_parallel.softmax.attend import Exchange, Method, attend
from components.context_parallel.softmax.flex import DIRECT, FlexKernel
from components.context_parallel.softmax.kernel import Kernel, PlainKernel, Scores
from components.context_parallel.softmax.volume import Heads
from components.titan.attention import OutTransform, refuse_unknown
from kernels.position.alibi import DistanceBias

_TENSORS = ("q_BLNH", "k_BLNH", "v_BLNH")


class SharedAttention(Module):
    """Inner attention of one layer: this rank's queries over all keys that they see."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        method: Method
        """What ranks exchange, see ``Exchange``. A layer with a window exchanges that alone."""

        inner_ring: int | None = None
        """Ranks of an inner ring of "double_ring"."""

        window: int | None = None
        """Tokens that a token sees, itself the last; None: its whole document up to it."""

        direct: bool = DIRECT
        """On CUDA: whether backward runs no block's forward again, see ``FlexKernel``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.direct = config.direct
        self._sharding_config: ShardingConfig | None = None
        exchange = Exchange(config.method, config.inner_ring)
        self.exchange, self.window = exchange.of_layer(config.window), config.window

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """See torchtitan's ``Module.parallelize``; keys and values are not gathered beforehand."""
        if self._sharding_config is not None:
            self._sharding_config = sequence_stays_cut(self._sharding_config)
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Share,
        scale: float | None = None,
        out_transform: OutTransform | None = None,
        score_mod: Any = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        """(B, L, heads, H) each -> (B, L, N, Hv), ``attention_masks`` a ``Share`` of B L tokens.

        ``out_transform`` gets the log-sum-exp over all keys, (B, L, N), wherever they are.

        Raises:
            TypeError: no ``Share``, or arguments that would be lost.
            ValueError: a ``score_mod`` other than ALiBi's, or what ``attend`` raises.
        """
        refuse_unknown(others)
        if not isinstance(attention_masks, Share):
            raise TypeError(
                f"attention_masks: {type(attention_masks).__name__}; where a sequence is split "
                "over ranks (components.context_parallel) attention takes a Share of the batch"
            )
        if score_mod is not None and not isinstance(score_mod, DistanceBias):
            raise ValueError(
                "components.context_parallel: attention whose sequence is split over ranks cannot "
                "apply a score_mod other than ALiBi's"
            )
        slopes = None if score_mod is None else score_mod.slopes
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        out, lse = attend(
            q_BLNH.flatten(0, 1),
            k_BLNH.flatten(0, 1),
            v_BLNH.flatten(0, 1),
            attention_masks,
            self.exchange,
            Scores(scale, self.window, slopes),
            kernel_on(q_BLNH.device, self.direct),
            need_lse=out_transform is not None,
        )
        out = out.unflatten(0, q_BLNH.shape[:2])
        if out_transform is None:
            return out
        assert lse is not None
        return out_transform(out, lse.unflatten(0, q_BLNH.shape[:2]))


def kernel_on(device: torch.device, direct: bool = DIRECT) -> Kernel:
    """FlexAttention on CUDA, plain torch elsewhere, whose backward runs no forward again anyway."""
    return FlexKernel(direct) if device.type == "cuda" else PlainKernel()


def share_attention(
    config: BaseAttention.Config, exchange: Exchange, direct: bool = DIRECT
) -> BaseAttention.Config:
    """A layer's attention with the sequence split over ranks; its window, if it has one, is kept.

    For ``RunPlan.swap`` of ``BaseAttention.Config``.
    """
    inner = derive(
        config.inner_attention,
        SharedAttention.Config,
        method=exchange.method,
        inner_ring=exchange.inner_ring,
        window=getattr(config, "sliding_window_size", None),
        direct=direct,
    )
    return replace(config, inner_attention=inner)


@dataclass(frozen=True)
class LayerShape:
    """What a layer's attention is, as far as its exchange goes.

    Attributes:
        heads: of one tensor-parallel rank.
        window: tokens that a token sees; None: all of its document up to it.
        sinks: whether attention sinks want the log-sum-exp.
    """

    heads: Heads
    window: int | None
    sinks: bool


def layer_shapes(model: BaseModel.Config, tensor_ranks: int) -> tuple[LayerShape, ...]:
    """Of all layers of a decoder; none if any has an attention without key heads of its own."""
    attentions = [layer.attention for layer in cast(Decoder.Config, model).layers]
    if not all(isinstance(a, GQAttention.Config | SinkAttention.Config) for a in attentions):
        return ()
    return tuple(_shape(attention, tensor_ranks) for attention in attentions)


def _shape(config: Any, tensor_ranks: int) -> LayerShape:
    key_heads = config.n_heads if config.n_kv_heads is None else config.n_kv_heads
    width = config.dim // config.n_heads if config.head_dim is None else config.head_dim
    heads = Heads(config.n_heads // tensor_ranks, key_heads // tensor_ranks, width, width)
    window = getattr(config, "sliding_window_size", None)
    return LayerShape(heads, window, isinstance(config, SinkAttention.Config))


def sequence_stays_cut(config: ShardingConfig) -> ShardingConfig:
    """Inputs and their gradients as they come: every rank has its own tokens' keys and values."""
    inputs = config.in_src_shardings
    assert inputs is not None
    own = tuple(inputs[name] for name in _TENSORS)
    return replace(
        config, in_dst_shardings=inputs, local_map=LocalMapConfig(in_grad_placements=own)
    )
