"""Multi-head latent attention without positions (NoPE MLA) over the pools that an indexer chose.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1) for MLA, DeepSeek-V3.2 (arXiv 2512.02556) for
the sparse form; widths and the missing rotary part as in transformers' ``glm5_next``.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.indexer import Indexer
from components.models.glm_flash.indexer_loss import IndexerLoss
from components.recompute.tape import choice
from kernels.dsa.plain import attend_backward, sparse_mla
from kernels.dsa.sparse_mla_kl import Student

Place = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of queries: pools, position and start; see ``kernels.dsa.plain.sparse_mla``."""


class SparseMlaCore(Module):
    """Softmax attention of every query over its chosen tokens. No parameters."""

    teaches: ClassVar[bool] = False
    """Whether ``teach`` is there: the attention's backward pass yields the pools' probabilities."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        kpool: int
        scale: float
        chunk_bytes: int
        """For the queries that a kernel or the dense baseline computes together."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        pools: torch.Tensor,
        documents: Documents,
        *,
        transient: bool = False,
        student: Student | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            q: (T, heads, head_dim).
            latent: (T, kv_lora_rank), normalised, the dtype of ``q``.
            kv_b: (heads * (head_dim + v_head_dim), kv_lora_rank).
            pools: int32 (T, n), the chosen pools.
            documents: of the T tokens.
            transient: whether the graph is gone before much else is kept: then it may keep more, so
                that less runs in backward.
            student: an indexer that backward is to train, where this ``teaches``.

        Returns:
            (T, heads, v_head_dim) in the dtype of ``q``.
        """
        place = pools, documents.position, documents.start
        if student is not None:
            return self.teach(q, latent, kv_b, place, student)
        return self.attend(q, latent, kv_b, place, transient)

    def attend(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        place: Place,
        transient: bool,
    ) -> torch.Tensor:
        """See ``forward`` and ``kernels.dsa.plain.sparse_mla``."""
        size, scale = self.config.kpool, self.config.scale
        return sparse_mla(q, latent, kv_b, *place, size=size, scale=scale)

    def gradients(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        place: Place,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of ``attend``'s q, latent and kv_b, for callers that keep no graph of it.

        That of the latent is not rounded: float32 (float64 for float64), for sums over ranks.
        """
        size, scale = self.config.kpool, self.config.scale
        return attend_backward(grad_out, q, latent, kv_b, *place, size=size, scale=scale)

    def teach(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        place: Place,
        student: Student,
    ) -> torch.Tensor:
        """``attend``, whose backward also trains an indexer; see ``kernels.dsa.sparse_mla_kl``."""
        raise NotImplementedError(f"{type(self).__name__} yields no probabilities of pools")


class SparseMLA(Module):
    """The mixer of the ``dsa`` layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        head_dim: int
        q_a_proj: Linear.Config
        q_a_norm: RMSNorm.Config
        q_b_proj: Linear.Config
        kv_a_proj: Linear.Config
        kv_a_norm: RMSNorm.Config
        kv_b_proj: Linear.Config
        o_proj: Linear.Config
        indexer: Indexer.Config
        core: SparseMlaCore.Config
        indexer_loss: IndexerLoss.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_a_proj, self.q_a_norm = config.q_a_proj.build(), config.q_a_norm.build()
        self.q_b_proj = config.q_b_proj.build()
        self.kv_a_proj, self.kv_a_norm = config.kv_a_proj.build(), config.kv_a_norm.build()
        self.kv_b_proj = config.kv_b_proj.build()
        self.o_proj = config.o_proj.build()
        self.indexer = config.indexer.build()
        self.core = config.core.build()
        self.indexer_loss = None if config.indexer_loss is None else config.indexer_loss.build()

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        """(B, L, D) -> (B, L, D)."""
        flat = x.flatten(0, 1)
        query_latent, q = self.queries(flat)
        latent = self.latent(flat)
        kv_b = self.kv_b_proj.weight
        if self.indexer_loss is None or not (self.training and torch.is_grad_enabled()):
            chosen = self.indexer(flat, query_latent, documents)
            out = self.core(q, latent, kv_b, chosen, documents)
        else:
            # Detached: the loss trains the indexer and nothing before it.
            inputs = self.indexer.prepare(flat.detach(), query_latent.detach(), documents)
            chosen = choice(lambda: self.indexer.choose(inputs, documents))
            out = self.indexer_loss(self.core, inputs, q, latent, kv_b, chosen, documents)
        return self.o_proj(out.flatten(1)).view_as(x)

    def queries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, D) -> query latent, normalised (T, q_lora_rank), and queries (T, heads, head_dim)."""
        query_latent = self.q_a_norm(self.q_a_proj(x))
        return query_latent, self.q_b_proj(query_latent).unflatten(-1, (-1, self.head_dim))

    def latent(self, x: torch.Tensor) -> torch.Tensor:
        """(T, D) -> the latent of keys and values, normalised (T, kv_lora_rank)."""
        return self.kv_a_norm(self.kv_a_proj(x))
