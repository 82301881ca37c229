"""Position encodings as torchtitan's decoders take them.

Those read the longest sequence off ``attention.rope`` and shard its ``cache``, whatever encodes the
positions; so every encoding here is a ``RoPE``.
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import CosSinRoPE, RoPE
from torchtitan.models.common.attention import AttentionMasksType, GQAttention

from kernels.position.alibi import DistanceBias
from kernels.position.rotary import (
    Stretch,
    inverse_frequencies,
    rotation_table,
    temperature_root,
)

# Tables by what they are computed from. A table goes when the last layer that holds it goes.
_tables: WeakValueDictionary[tuple[Any, ...], torch.Tensor] = WeakValueDictionary()


class SharedRoPE(CosSinRoPE):
    """torchtitan's rotary embedding, to the bit, with one table for all layers that agree on it.

    A table is fp32 (max_seq_len, 2 x head width): 1 GiB at 1M tokens and heads of 128, which each
    layer would hold on every rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        key = (*self._computed_from(), torch.get_default_device())
        table = _tables.get(key)
        if table is None:
            _tables[key] = table = self._table()
        return table

    def _computed_from(self) -> tuple[Any, ...]:
        c = self.config
        yarn = (c.rope_factor, c.beta_fast, c.beta_slow, c.original_seq_len, c.truncate)
        return type(self), c.dim, c.max_seq_len, c.theta, c.scaling, *yarn

    def _table(self) -> torch.Tensor:
        return CosSinRoPE._precompute_cache(self)


class StretchedRoPE(SharedRoPE):
    """Rotary embedding for a context ``rope_factor`` times the trained one.

    ``scaling`` stays "none": gpt-oss's attention would apply a temperature of its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SharedRoPE.Config):
        stretch: Stretch = "none"
        """How frequencies follow ``rope_factor``; see ``kernels.position.rotary``."""
        mscale: float = 1.0
        """Strength of YaRN's attention temperature."""

    config: Config

    def _computed_from(self) -> tuple[Any, ...]:
        return *SharedRoPE._computed_from(self), self.config.stretch, self.config.mscale

    def _table(self) -> torch.Tensor:
        c = self.config
        frequencies = inverse_frequencies(
            c.dim,
            c.theta,
            c.stretch,
            factor=c.rope_factor,
            trained_len=c.original_seq_len,
            beta_fast=c.beta_fast,
            beta_slow=c.beta_slow,
        )
        scale = temperature_root(c.rope_factor, c.mscale) if c.stretch == "yarn" else 1.0
        return rotation_table(frequencies, c.max_seq_len, scale)


class NoRotation(RoPE):
    """Queries and keys as they are. Its cache holds ``rates``, or one zero."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        rates: list[float] = field(default_factory=list)
        """Numbers that layers keep on their device in float32: ALiBi's slopes of all heads."""

    config: Config

    def _precompute_cache(self) -> torch.Tensor:
        return torch.tensor(self.config.rates or [0.0], dtype=torch.float32)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``query`` and ``key``."""
        return query, key


class AlibiAttention(GQAttention):
    """Grouped-query attention whose scores fall with the distance: see ``kernels.position.alibi``.

    Under tensor parallelism a rank has consecutive heads, and takes their slopes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._head_ranks, self._head_rank = 1, 0

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """See torchtitan's ``Module.parallelize``; remembers which heads this rank has."""
        mesh = parallel_dims.get_optional_mesh("tp")
        if mesh is not None:
            self._head_ranks, self._head_rank = mesh.size(), mesh.get_local_rank()
        super().parallelize(parallel_dims)

    def forward(
        self,
        x_BLD: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(B, L, D) -> (B, L, D), or this rank's part of the sum over heads."""
        q, k, v = self.qkv_linear(x_BLD)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.inner_attention(
            q,
            k,
            v,
            attention_masks=attention_masks,
            score_mod=DistanceBias(self._local_slopes()),
            scale=self.scaling,
            enable_gqa=self.enable_gqa,
        )
        return self.wo(out.contiguous().flatten(2))

    def _local_slopes(self) -> torch.Tensor:
        slopes = self.rope.cache
        if isinstance(slopes, DTensor):
            slopes = slopes.to_local()
        heads = self.n_heads // self._head_ranks
        return slopes[self._head_rank * heads :][:heads]
