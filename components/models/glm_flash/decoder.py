"""The whole text model: embedding, layers over n residual streams, mean, norm, output head."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.token_dispatcher import update_ep_token_dispatcher_config
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.flops import training_flops_per_token
from components.models.glm_flash.sharding import set_sharding
from components.titan.decoder import project_to_vocabulary
from components.titan.moe import force_balance


class GlmFlashDecoder(Decoder):
    """GLM-5.3-Flash's text model, without its multi-token prediction layer and vision tower.

    There is no rotary embedding: order reaches the model through KDA's recurrence, the short
    convolutions, the causal choice of keys, and a pool's weights by place.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        streams: int
        """Residual streams, n."""

        max_context: int
        """Longest sequence, in tokens."""

        train: Literal["backbone", "everything", "indexers"] = "backbone"
        """Which parameters are trained: all but the indexers', all, or theirs alone."""

        @property
        def first_attention(self) -> None:
            """None: no layer uses one of torchtitan's attentions, nor the masks built for them."""
            return None

        @property
        def max_seq_len(self) -> int:
            return self.max_context

        def update_from_config(self, *, config: Any, **others: Any) -> None:
            """See torchtitan's ``BaseModel.Config``; called once, before components' overrides."""
            update_ep_token_dispatcher_config(self, config)
            for layer in self.layers:
                if layer.moe is not None:
                    force_balance(layer.moe.router, config.debug.moe_force_load_balance)
            set_sharding(self, expert_parallel=config.parallelism.expert_parallel_degree > 1)

        def get_nparams_and_flops(self, model: Module, seq_len: int) -> tuple[int, int]:
            """Parameters of the whole ``model``, and FLOPs per token of one training step."""
            count = sum(parameter.numel() for parameter in model.parameters())
            return count, training_flops_per_token(self, seq_len)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.streams = config.streams

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: Any = None,
    ) -> torch.Tensor:
        """Logits of every position.

        Args:
            tokens: int64 (B, L).
            positions: int64 (B, L), distance from the start of each token's document; one document
                per row if left out.
            attention_masks: what mixers are given where the tokens are a share of a batch, whose
                documents their positions do not tell; None: the documents found in ``positions``.

        Returns:
            (B, L, vocab_size), or hidden states (B, L, D) where the loss applies the head.
        """
        documents = attention_masks
        if documents is None:
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            documents = Documents.from_positions(positions)
        # Tensor ranks hold equal parts of a row; shares of a batch have any length.
        padding = -tokens.shape[1] % spmd_mesh_size("tp")
        embedded = self.tok_embeddings(F.pad(tokens, (0, padding)))
        streams = embedded.unsqueeze(2).expand(-1, -1, self.streams, -1).contiguous()
        for layer in self.layers.values():
            streams = layer(streams, documents)
        hidden = self.norm(streams.mean(2))
        if padding:
            # A copy: FSDP2 hooks what a model returns, and warns of views.
            hidden = hidden[:, :-padding].clone()
        return project_to_vocabulary(self, hidden)

    def freeze(self) -> None:
        """Keep gradients and optimizer state away from what ``config.train`` does not train."""
        train = self.config.train
        for name, parameter in self.named_parameters():
            is_indexer = ".indexer." in name
            parameter.requires_grad_(train == "everything" or is_indexer == (train == "indexers"))
