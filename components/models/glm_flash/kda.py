"""Kimi delta attention (KDA): linear attention with a decay per key channel and the delta rule.

Source: Kimi Linear, arXiv 2510.26692, section 3; the bounded gate as in transformers' ``glm5_next``
and flash-linear-attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn as nn
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.norms import GatedRMSNorm
from components.models.glm_flash.short_conv import ShortConv
from kernels.kda.chunked import kda, kda_piece


class KdaCore(Module):
    """The recurrence with its gate; ``A_log`` and ``dt_bias`` are float32 in every regime."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        heads: int
        head_dim: int
        lower_bound: float

    kernel: ClassVar[Callable[..., torch.Tensor]] = staticmethod(kda)
    """What computes it: a function like ``kernels.kda.chunked.kda``."""

    piece_kernel: ClassVar[Callable[..., tuple[torch.Tensor, torch.Tensor | None]]] = staticmethod(
        kda_piece
    )
    """The same for a piece of the tokens: a function like ``kernels.kda.chunked.kda_piece``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.lower_bound = config.lower_bound
        self.A_log = nn.Parameter(torch.empty(config.heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(
            torch.empty(config.heads * config.head_dim, dtype=torch.float32)
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        raw_gate: torch.Tensor,
        beta: torch.Tensor,
        documents: Documents,
    ) -> torch.Tensor:
        """All (T, heads, head_dim), but ``beta`` (T, heads), in the compute dtype; returns the
        shape and dtype of ``v``."""
        return self.kernel(
            q, k, v, raw_gate, beta, self.A_log, self.dt_bias, documents.lengths,
            lower_bound=self.lower_bound,
        )  # fmt: skip

    def piece(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        raw_gate: torch.Tensor,
        beta: torch.Tensor,
        lengths: tuple[int, ...],
        state: torch.Tensor | None,
        carries: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``forward`` for a piece of the tokens; see ``kernels.kda.chunked.kda_piece``."""
        return self.piece_kernel(
            q, k, v, raw_gate, beta, self.A_log, self.dt_bias, lengths, state,
            lower_bound=self.lower_bound, carries=carries,
        )  # fmt: skip


class KDA(Module):
    """The mixer of the ``kda`` layers: projections, convolutions, the recurrence, a gated norm."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        head_dim: int
        q_proj: Linear.Config
        k_proj: Linear.Config
        v_proj: Linear.Config
        q_conv: ShortConv.Config
        k_conv: ShortConv.Config
        v_conv: ShortConv.Config
        f_a_proj: Linear.Config
        f_b_proj: Linear.Config
        b_proj: Linear.Config
        core: KdaCore.Config
        g_a_proj: Linear.Config
        g_b_proj: Linear.Config
        o_norm: GatedRMSNorm.Config
        o_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj, self.q_conv = config.q_proj.build(), config.q_conv.build()
        self.k_proj, self.k_conv = config.k_proj.build(), config.k_conv.build()
        self.v_proj, self.v_conv = config.v_proj.build(), config.v_conv.build()
        self.f_a_proj, self.f_b_proj = config.f_a_proj.build(), config.f_b_proj.build()
        self.b_proj = config.b_proj.build()
        self.core = config.core.build()
        self.g_a_proj, self.g_b_proj = config.g_a_proj.build(), config.g_b_proj.build()
        self.o_norm = config.o_norm.build()
        self.o_proj = config.o_proj.build()

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        """(B, L, D) -> (B, L, D)."""
        flat = x.flatten(0, 1)
        q, k, v = self.convolved(flat, documents)
        raw_gate, beta = self.gates(flat)
        out = self.core(q, k, v, raw_gate, beta, documents)
        return self.project(out, flat).view_as(x)

    def convolved(
        self, x: torch.Tensor, documents: Documents
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(T, D) -> queries, keys and values, (T, heads, head_dim) each."""
        return (
            self._heads(self.convolve(self.q_conv, self.q_proj(x), documents)),
            self._heads(self.convolve(self.k_conv, self.k_proj(x), documents)),
            self._heads(self.convolve(self.v_conv, self.v_proj(x), documents)),
        )

    def convolve(self, conv: ShortConv, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        """(T, channels) -> (T, channels)."""
        return conv(x, documents)

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, D) -> raw decay gate (T, heads, head_dim) and beta (T, heads)."""
        return self._heads(self.f_b_proj(self.f_a_proj(x))), self.b_proj(x).sigmoid()

    def project(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The core's output (T, heads, head_dim), gated by the mixer's input (T, D) -> (T, D)."""
        gate = self._heads(self.g_b_proj(self.g_a_proj(x)))
        return self.o_proj(self.o_norm(out, gate).flatten(1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))
