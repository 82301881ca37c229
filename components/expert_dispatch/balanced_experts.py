"""torchtitan's routed experts, their rows spread over the ranks by a plan of the layer."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torchtitan.config import derive, override
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

from components.core.shards import local_of
from components.expert_dispatch.balanced import run_balanced
from components.expert_dispatch.counts import fullest, gather_counts
from components.expert_dispatch.layer_pass import Surroundings
from components.expert_dispatch.layer_plan import LayerLoad, LayerPlan, PlanRule
from components.expert_dispatch.partition import WHOLE, ChunkRule, Membership, agree
from components.expert_dispatch.weights import weight_group
from components.recompute.tape import choice, recomputing
from components.titan.combine import combine_at_home


class BalancedRoutedExperts(RoutedExperts):
    """``RoutedExperts`` that run on whichever rank a plan of the layer's load gives their rows to.

    The dispatcher moves nothing itself: it tells the group, and how outputs are combined.

    Attributes:
        latest: numbers about the latest forward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        capacity_factor: float
        """See ``PlanRule``."""

        minimum_rows: int
        """See ``PlanRule``."""

        threshold: float
        """See ``PlanRule``."""

        chunk_tokens: int | None
        """See ``ChunkRule``; None: one chunk."""

        max_chunks: int
        """See ``ChunkRule``."""

        membership: Membership
        """See ``ChunkRule``."""

        kept_chunks: int
        """See ``run_balanced``."""

        rounded_sums: bool
        """See ``Surroundings``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.plan_rule = PlanRule(
            capacity_factor=config.capacity_factor,
            minimum_rows=config.minimum_rows,
            threshold=config.threshold,
        )
        self.chunk_rule = WHOLE
        if config.chunk_tokens is not None:
            self.chunk_rule = ChunkRule(
                chunk_tokens=config.chunk_tokens,
                max_chunks=config.max_chunks,
                membership=config.membership,
            )
        self.kept_chunks, self.rounded_sums = config.kept_chunks, config.rounded_sums
        self.latest: LayerLoad | None = None
        self._compared = False

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Tokens (B, L, D), weights (B, L, K), expert ids (B, L, K) -> (B, L, D).

        Raises:
            DisagreementError: ranks that exchange tokens follow different settings.
            ValueError: experts are not spread over ranks: there is nothing to even out.
        """
        routing = x_BLD, topk_scores_BLK, topk_expert_ids_BLK
        x, weights, ids = (tensor.flatten(0, 1) for tensor in routing)
        group = self._group()
        layer = self._plan(ids, group)
        around = Surroundings(
            experts=self.inner_experts,
            combine=partial(combine_at_home, self.token_dispatcher),
            rows_group=group,
            weights_group=weight_group(group),
            rounded_sums=self.rounded_sums,
        )
        out = run_balanced(around, layer, x, weights, ids, self.kept_chunks)
        # Afterwards: the device has been told what to do meanwhile.
        if not recomputing():
            self.latest = layer.load(x.itemsize * x.shape[1], self._expert_bytes(layer))
        return out.view(x_BLD.shape)

    def _group(self) -> dist.ProcessGroup:
        dispatcher = self.token_dispatcher
        if not isinstance(dispatcher, BaseEPTokenDispatcher) or dispatcher.ep_mesh is None:
            raise ValueError(
                "parallelism.expert_parallel_degree is 1: every rank computes its own rows; legal: "
                "2 or more where experts' rows are planned"
            )
        return dispatcher.ep_mesh.get_group()

    def _plan(self, ids: torch.Tensor, group: dist.ProcessGroup) -> LayerPlan:
        """As made in forward: a layer that runs again does not ask the other ranks again."""
        self._compare_settings(ids, group)
        rule, experts = self.chunk_rule, self.token_dispatcher.num_experts
        counts = choice(lambda: gather_counts(ids, experts, rule, group))
        return LayerPlan(
            rank=dist.get_rank(group),
            counts=counts,
            partition=rule.cut(len(ids), fullest(counts, ids.shape[1])),
            rule=self.plan_rule,
        )

    def _compare_settings(self, ids: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Once: they do not change, and the host waits for the answer. Experts in chunks that are
        not planned ask in the same way, so such ranks meet as well, and see that they differ."""
        if not self._compared:
            agree(self.chunk_rule, len(ids), group, ids.device, self.plan_rule.settings)
            self._compared = True

    def _expert_bytes(self, layer: LayerPlan) -> int:
        """Of one expert's weights, as they are while the layer runs."""
        return sum(local_of(p).nbytes for p in self.inner_experts.parameters()) // (
            layer.local_experts
        )


@override(target=RoutedExperts.Config, description="routed experts spread over ranks by a plan")
def balanced_experts(
    cfg: RoutedExperts.Config,
    *,
    capacity_factor: float,
    minimum_rows: int,
    threshold: float,
    chunk_tokens: int | None = None,
    max_chunks: int = 1,
    membership: Membership = "strided",
    kept_chunks: int = 0,
    rounded_sums: bool = False,
) -> BalancedRoutedExperts.Config:
    return derive(
        cfg,
        BalancedRoutedExperts.Config,
        capacity_factor=capacity_factor,
        minimum_rows=minimum_rows,
        threshold=threshold,
        chunk_tokens=chunk_tokens,
        max_chunks=max_chunks,
        membership=membership,
        kept_chunks=kept_chunks,
        rounded_sums=rounded_sums,
    )
