"""SwiGLU with limits: the routed experts, the shared expert, the dense layers."""

from dataclasses import dataclass

import torch
from torchtitan.models.common import FeedForward
from torchtitan.models.common.moe import GroupedExperts

from kernels.grouped_mm import grouped_mm
from kernels.swiglu import clamped_swiglu


class ClampedFeedForward(FeedForward):
    """The dense layers and the shared expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        limit: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.limit = config.limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit))


class ClampedGroupedExperts(GroupedExperts):
    """All routed experts of a rank; input and weights are of one dtype, and so is the output."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        limit: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.limit = config.limit

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert (R, D) -> (R, D); counts (E,) add up to R."""
        ends = num_tokens_per_expert_E.cumsum(0).int()
        gate = grouped_mm(x_RD, self.w1_EFD, ends)
        up = grouped_mm(x_RD, self.w3_EFD, ends)
        return grouped_mm(clamped_swiglu(gate, up, self.limit), self.w2_EDF, ends)
