"""Routers that follow a routing profile (``debug.routing_profile``), in any model with experts."""

from dataclasses import dataclass

import torch
from torchtitan.config import derive
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.protocols.model import BaseModel

from components.expert_dispatch.profiles import RoutingProfile
from components.expert_dispatch.routes import count_routes
from components.titan.parts import with_functions


def follow_profile(model: BaseModel.Config, profile: RoutingProfile) -> None:
    """Let ``profile`` choose the experts of every layer, in the place of forced balance.

    A route's weight stays its expert's score, normalised and scaled as the model does it, so the
    router has gradients. ``debug.moe_force_load_balance`` must be set where the model is built: it
    is the switch that routers ask.

    Args:
        model: changed in place, before components replace parts of it.

    Raises:
        ValueError: a layer has experts that cannot be routed to like this.
    """
    for _, moe, _, _ in model.traverse(MoE.Config):
        assert isinstance(moe, MoE.Config)
        problem = profile.problem(moe.num_experts)
        if problem:
            raise ValueError(f"debug.routing_profile: {str(profile)!r}: {problem}")
        routes = _ForcedRoutes(profile, moe.router.top_k)
        functions = (("_debug_force_load_balance_routing", routes),)
        moe.router = with_functions(moe.router, "Profiled", functions)
        if profile.repeats(moe.router.top_k, moe.num_experts):
            moe.routed_experts = derive(moe.routed_experts, RouteCountingExperts.Config)


@dataclass(frozen=True, slots=True)
class _ForcedRoutes:
    """What a router calls instead of torchtitan's round robin."""

    profile: RoutingProfile
    top_k: int

    def __call__(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores (B, L, E) -> expert ids int64 and their scores, (B, L, K)."""
        batch, length, experts = scores.shape
        ids = self.profile.expert_ids(batch * length, self.top_k, experts, scores.device)
        ids = ids.view(batch, length, self.top_k)
        return ids, scores.gather(-1, ids)


class RouteCountingExperts(RoutedExperts):
    """torchtitan's routed experts for tokens that visit an expert more than once.

    Its layer counts tokens per expert, which is one for such a token; its dispatchers need routes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """(B, L, D), scores and expert ids (B, L, K), and counts that are not used -> (B, L, D)."""
        routes = count_routes(topk_expert_ids_BLK, len(num_local_tokens_per_expert_E))
        return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, routes)
