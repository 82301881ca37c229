"""The optional loss that trains an indexer; see ``components.indexer_training``."""

from dataclasses import dataclass

import torch
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.indexer import IndexerInputs
from kernels.attach import attach_loss
from kernels.dsa.indexer_loss import Support, Teacher, indexer_kl


class IndexerLoss(Module):
    """Adds the indexer's divergence from the attention to the training loss. No parameters.

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
        out: torch.Tensor,
        inputs: IndexerInputs,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        chosen: torch.Tensor,
        documents: Documents,
    ) -> torch.Tensor:
        """The attention's output with the loss attached.

        Args:
            out: (T, heads, v_head_dim).
            inputs: what the indexer scored.
            q: (T, heads, head_dim), the attention's queries.
            latent: (T, kv_lora_rank), normalised.
            kv_b: (heads * (head_dim + v_head_dim), kv_lora_rank).
            chosen: int32 (T, n), the chosen pools.
            documents: of the T tokens.
        """
        settings = self.config
        teacher = Teacher(
            q=q.detach(),
            latent=latent.detach(),
            kv_b=kv_b.detach(),
            chosen=chosen,
            position=documents.position,
            start=documents.start,
            lengths=documents.lengths,
            size=settings.kpool,
            scale=settings.scale,
        )
        loss = indexer_kl(
            inputs.queries,
            inputs.weights,
            inputs.keys,
            inputs.pools,
            teacher,
            settings.index_scale,
            settings.support,
        )
        return attach_loss(out, loss, settings.coefficient / settings.tokens, self._add)

    def reset(self) -> None:
        """Begin a new sum."""
        self.divergence = None

    def _add(self, loss: torch.Tensor) -> None:
        self.divergence = loss if self.divergence is None else self.divergence + loss
