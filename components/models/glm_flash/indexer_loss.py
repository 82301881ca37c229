"""The optional loss that trains an indexer; see ``components.indexer_training``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.indexer import IndexerInputs
from kernels.attach import attach_loss
from kernels.dsa.indexer_loss import Support, Teacher, indexer_kl
from kernels.dsa.sparse_mla_kl import Student

if TYPE_CHECKING:
    from components.models.glm_flash.mla import SparseMlaCore


class IndexerLoss(Module):
    """Adds the indexer's divergence from the attention to the training loss. No parameters.

    Over the selected pools, where a kernel computes the attention, its backward pass yields the
    target. Otherwise the attention is computed once more for it, a few queries at a time.

    Attributes:
        divergence: sum over queries of KL since the last reset, as far as backward has come.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        coefficient: float
        """Factor on the mean over the tokens of a step."""

        tokens: int
        """Tokens of a step, all ranks and accumulation passes."""

        support: Support
        kpool: int
        scale: float
        """Factor on the attention's logits."""

        index_scale: float
        """Factor on the indexer's products."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.divergence: torch.Tensor | None = None

    def forward(
        self,
        core: "SparseMlaCore",
        inputs: IndexerInputs,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        chosen: torch.Tensor,
        documents: Documents,
    ) -> torch.Tensor:
        """The attention's output with the loss attached.

        Args:
            core: the attention.
            inputs: what the indexer scored.
            q: (T, heads, head_dim), the attention's queries.
            latent: (T, kv_lora_rank), normalised.
            kv_b: (heads * (head_dim + v_head_dim), kv_lora_rank).
            chosen: int32 (T, n), the chosen pools.
            documents: of the T tokens.

        Returns:
            (T, heads, v_head_dim) in the dtype of ``q``.
        """
        settings, attention = self.config, (q, latent, kv_b)
        if core.teaches and settings.support == "selected":
            return core(*attention, chosen, documents, student=self._student(inputs))
        out = core(*attention, chosen, documents)
        teacher = self._teacher(*attention, chosen, documents)
        loss = indexer_kl(
            inputs.queries,
            inputs.weights,
            inputs.keys,
            inputs.pools,
            teacher,
            settings.index_scale,
            settings.support,
        )
        return attach_loss(out, loss, self._factor, self._add)

    def reset(self) -> None:
        """Begin a new sum."""
        self.divergence = None

    def _add(self, loss: torch.Tensor) -> None:
        self.divergence = loss if self.divergence is None else self.divergence + loss

    @property
    def _factor(self) -> float:
        return self.config.coefficient / self.config.tokens

    def _student(self, inputs: IndexerInputs) -> Student:
        return Student(
            queries=inputs.queries,
            weights=inputs.weights,
            keys=inputs.keys,
            pools=inputs.pools,
            scale=self.config.index_scale,
            factor=self._factor,
            seen=self._add,
        )

    def _teacher(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        chosen: torch.Tensor,
        documents: Documents,
    ) -> Teacher:
        return Teacher(
            q=q.detach(),
            latent=latent.detach(),
            kv_b=kv_b.detach(),
            chosen=chosen,
            position=documents.position,
            start=documents.start,
            lengths=documents.lengths,
            size=self.config.kpool,
            scale=self.config.scale,
        )
