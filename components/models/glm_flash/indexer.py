"""The indexer: a small attention over pools of keys that decides what the large one sees.

Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1) for the scoring; the pooled keys as in
transformers' ``glm5_next``.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchtitan.models.common import Linear
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from components.recompute.tape import choice
from kernels.dsa.pooling import Pools, pool_keys
from kernels.dsa.select import bytes_per_pair, select_pools, windows
from kernels.precision import accumulation_dtype


@dataclass(frozen=True)
class IndexerInputs:
    """What the scores are made of.

    Attributes:
        queries: (T, heads, d).
        weights: (T, heads) float32, signed, 1 / sqrt(heads) included.
        keys: (P, d), one per complete pool of the batch.
        pools: which tokens and documents they belong to.
        key_factors: float32 (P,), factors on the scores of pools whose keys are in fp8, else None.
    """

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    pools: Pools
    key_factors: torch.Tensor | None = None


class PoolSelector(Module):
    """Scores and chooses pools of every query. No parameters."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        topk: int
        kpool: int
        scale: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    @property
    def count(self) -> int:
        """Pools per query, at most."""
        return self.config.topk // self.config.kpool

    def blocks(
        self, lengths: tuple[int, ...], begin: int, stop: int, heads: int
    ) -> list[tuple[int, int]]:
        """Cut queries where a cut changes nothing, not even the shape of a matrix product.

        Args:
            lengths: tokens of the documents.
            begin, stop: tokens that ask, in the batch.
            heads: scoring heads.

        Returns:
            First row and the one after the last, of each block, counted from ``begin``.
        """
        cuts = windows(lengths, self.config.kpool, bytes_per_pair(heads), begin, stop)
        return [(cut.q0 - begin, cut.q1 - begin) for cut in cuts]

    def forward(self, inputs: IndexerInputs, documents: Documents, begin: int) -> torch.Tensor:
        """Choose pools.

        Args:
            inputs: queries and weights of consecutive tokens; all keys.
            documents: as the queries see them (``Documents.rows``).
            begin: the first query's token, in the batch.

        Returns:
            int32 (Q, n); see ``kernels.dsa.select.select_pools``.
        """
        return select_pools(
            inputs.queries,
            inputs.weights,
            inputs.keys,
            inputs.pools,
            documents.position,
            documents.lengths,
            size=self.config.kpool,
            count=self.count,
            scale=self.config.scale,
            begin=begin,
            key_factors=inputs.key_factors,
        )


class Indexer(Module):
    """Scores pools of ``kpool`` tokens and chooses ``topk / kpool`` of them for every query.

    The choice is discrete, so a training loss never reaches these parameters through it. They are
    frozen unless a component trains them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        heads: int
        head_dim: int
        topk: int
        kpool: int
        wq_b: Linear.Config
        wk: Linear.Config
        k_norm: LayerNorm.Config
        weights_proj: Linear.Config
        selector: PoolSelector.Config

        @property
        def scale(self) -> float:
            """Factor on every product of query and key."""
            return self.head_dim**-0.5

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wq_b, self.wk = config.wq_b.build(), config.wk.build()
        self.k_norm = config.k_norm.build()
        self.weights_proj = config.weights_proj.build()
        self.selector = config.selector.build()
        self.compress_ape = nn.Parameter(torch.empty(config.kpool, config.head_dim))
        self.compress_gate = nn.Parameter(torch.empty(config.head_dim, config.dim))

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, query_latent: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        """Choose pools.

        Args:
            x: (T, D), the mixer's input.
            query_latent: (T, q_lora_rank), normalised.
            documents: of the T tokens.

        Returns:
            int32 (T, n): pools counted from the document's start, ascending, then -1.
        """
        return choice(lambda: self.choose(self.prepare(x, query_latent, documents), documents))

    def prepare(
        self, x: torch.Tensor, query_latent: torch.Tensor, documents: Documents
    ) -> IndexerInputs:
        """Queries, their weights, and the pooled keys; differentiable in all seven parameters."""
        queries, weights = self.queries(x, query_latent)
        pools = documents.pools(self.config.kpool)
        return IndexerInputs(queries, weights, self.keys(x, pools), pools)

    def queries(
        self, x: torch.Tensor, query_latent: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``IndexerInputs``."""
        heads = self.config.heads
        queries = self.wq_b(query_latent).unflatten(-1, (heads, -1))
        weights = self.weights_proj(x)
        return queries, weights.to(accumulation_dtype(x.dtype)) * heads**-0.5

    def keys(self, x: torch.Tensor, pools: Pools) -> torch.Tensor:
        """See ``IndexerInputs``."""
        gates = F.linear(x, self.compress_gate)
        return pool_keys(self.k_norm(self.wk(x)), gates, self.compress_ape, pools.first)

    def choose(self, inputs: IndexerInputs, documents: Documents, begin: int = 0) -> torch.Tensor:
        """See ``PoolSelector.forward``."""
        return self.selector(inputs, documents, begin)
