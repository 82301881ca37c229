"""The router, with logits that are never rounded to bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from components.recompute.tape import choice
from components.titan.moe import ForcibleRouter
from kernels.precision import linear_accumulate_reference


class UnroundedRouter(ForcibleRouter):
    """Sigmoid scores in float32.

    They choose the experts together with the selection bias, and weigh them without it
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ForcibleRouter.Config):
        pass

    kernel: ClassVar[Callable[..., torch.Tensor]] = staticmethod(linear_accumulate_reference)
    """What computes the logits: a function like ``kernels.precision.linear_accumulate``."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights (B, L, K) float32, expert ids (B, L, K) int64, all scores (B, L, E) float32."""
        logits = self.kernel(x_BLD.flatten(0, 1), self.gate.weight)
        scores = logits.sigmoid().view(*x_BLD.shape[:2], -1)
        forced = self.forced(scores)
        if forced is not None:
            ids, weights = forced
        else:
            ids = choice(lambda: self._choose(scores.detach(), expert_bias_E))
            weights = scores.gather(-1, ids)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.route_scale, ids, scores

    def _choose(self, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        biased = scores if bias is None else scores + bias
        if self.num_expert_groups is not None:
            biased = self.limited(biased)
        return biased.topk(self.top_k, dim=-1, sorted=False).indices
