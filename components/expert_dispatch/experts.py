"""torchtitan's routed experts, a chunk of the tokens at a time."""

from dataclasses import dataclass

import torch
from torchtitan.config import derive, override
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

from components.expert_dispatch.chunked import run_in_chunks
from components.expert_dispatch.partition import ChunkRule, Membership, Partition, agree
from components.expert_dispatch.routes import count_routes
from components.recompute.tape import choice


class ChunkedRoutedExperts(RoutedExperts):
    """``RoutedExperts`` that dispatches a chunk of the tokens at a time.

    Experts and dispatcher are whatever they were.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        chunk_tokens: int
        """See ``ChunkRule``."""

        max_chunks: int
        """See ``ChunkRule``."""

        membership: Membership
        """See ``ChunkRule``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rule = ChunkRule(
            chunk_tokens=config.chunk_tokens,
            max_chunks=config.max_chunks,
            membership=config.membership,
        )

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Tokens (B, L, D), weights (B, L, K), expert ids (B, L, K) -> (B, L, D).

        Counts (E,) are those of all tokens; every chunk counts its own.

        Raises:
            DisagreementError: ranks that exchange tokens cut them by different settings.
        """
        routing = x_BLD, topk_scores_BLK, topk_expert_ids_BLK
        x, weights, ids = (tensor.flatten(0, 1) for tensor in routing)
        out = run_in_chunks(self._routed, self.inner_experts, x, weights, ids, self._partition(x))
        return out.view(x_BLD.shape[0], -1, out.shape[-1])

    def _partition(self, x: torch.Tensor) -> Partition:
        """As agreed in forward: a layer that runs again does not ask the other ranks again."""
        dispatcher, tokens = self.token_dispatcher, len(x)
        mesh = dispatcher.ep_mesh if isinstance(dispatcher, BaseEPTokenDispatcher) else None
        group = None if mesh is None else mesh.get_group()
        largest = choice(lambda: torch.tensor(agree(self.rule, tokens, group, x.device).largest))
        return self.rule.cut(tokens, int(largest))

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dispatcher = self.token_dispatcher
        # Every n-th row: dispatchers ask for one piece of memory.
        weights, ids = weights.contiguous(), ids.contiguous()
        counts = count_routes(ids, dispatcher.num_experts)
        rows, received, metadata = dispatcher.dispatch(x, weights, ids, counts)
        with maybe_set_sparse_mesh():
            rows = self.inner_experts(rows, received)
        return dispatcher.combine(rows, metadata, x)


@override(target=RoutedExperts.Config, description="routed experts in chunks of tokens")
def chunked_experts(
    cfg: RoutedExperts.Config, *, chunk_tokens: int, max_chunks: int, membership: Membership
) -> ChunkedRoutedExperts.Config:
    return derive(
        cfg,
        ChunkedRoutedExperts.Config,
        chunk_tokens=chunk_tokens,
        max_chunks=max_chunks,
        membership=membership,
    )
