"""Sparse latent attention a piece of the queries at a time.

Keys are small: the latent and the indexer's pooled keys exist for all tokens at once.
"""

from dataclasses import dataclass

import torch

from components.models.glm_flash.chunked.function import Outcome, Part, run_in_pieces
from components.models.glm_flash.chunked.pieces import Piece, cut
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.indexer import IndexerInputs
from components.models.glm_flash.mla import SparseMLA
from kernels.precision import accumulation_dtype


class ChunkedSparseMLA(SparseMLA):
    """``SparseMLA`` whose queries, and what is made of them, exist for a piece at a time.

    Pools are chosen in forward alone and kept, 4 bytes per pool and token. There is no loss for
    the indexer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SparseMLA.Config):
        chunk_tokens: int
        """Tokens of a piece."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.indexer_loss is not None:
            raise ValueError(
                "components.sublayer_chunking.dsa: true cannot train indexers "
                "(components.indexer_training); legal beside it: false"
            )
        self.chunk_tokens = config.chunk_tokens

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        """(B, L, D) -> (B, L, D)."""
        part = _SparseMlaPart(self, documents)
        return run_in_pieces(part, x.flatten(0, 1)).view_as(x)


class _SparseMlaPart(Part):
    module: ChunkedSparseMLA
    chooses = True

    def __init__(self, module: ChunkedSparseMLA, documents: Documents) -> None:
        super().__init__(module, cut(documents.lengths, module.chunk_tokens))
        self.documents = documents

    def shared(self, x: torch.Tensor, choosing: bool) -> tuple[torch.Tensor, ...]:
        """The latent, in full precision so that its gradient is rounded once; pooled keys."""
        latent = self.module.latent(x)
        latent = latent.to(accumulation_dtype(latent.dtype))
        if not choosing:
            return (latent,)
        indexer = self.module.indexer
        return latent, indexer.keys(x, self.documents.pools(indexer.config.kpool))

    def run(
        self,
        piece: Piece,
        x: torch.Tensor,
        shared: tuple[torch.Tensor, ...],
        state: torch.Tensor | None,
        choice: torch.Tensor | None,
    ) -> Outcome:
        module, latent = self.module, shared[0]
        asking = self.documents.rows(piece.begin, piece.stop)
        query_latent, q = module.queries(x)
        if choice is None:
            choice = self._choose(piece, x, query_latent, shared[1], asking)
        out = module.core(q, latent, module.kv_b_proj.weight, choice, asking, transient=True)
        return Outcome(module.o_proj(out.flatten(1)), choice=choice)

    def _choose(
        self,
        piece: Piece,
        x: torch.Tensor,
        query_latent: torch.Tensor,
        keys: torch.Tensor,
        asking: Documents,
    ) -> torch.Tensor:
        indexer = self.module.indexer
        queries, weights = indexer.queries(x, query_latent)
        pools = asking.pools(indexer.config.kpool)
        return indexer.choose(IndexerInputs(queries, weights, keys, pools), asking, piece.begin)
