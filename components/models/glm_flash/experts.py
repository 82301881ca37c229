"""SwiGLU with limits: the routed experts, the shared expert, the dense layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torchtitan.models.common import FeedForward
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from kernels.grouped_mm import grouped_mm
from kernels.swiglu import clamped_swiglu_reference


class ClampedSwiglu(Module):
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``. No parameters.

    A module of its own, so that it can be swapped whatever replaces the one around it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        limit: float

    kernel: ClassVar[Callable[..., torch.Tensor]] = staticmethod(clamped_swiglu_reference)
    """What computes it: a function like ``kernels.swiglu.clamped_swiglu``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.limit = config.limit

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape and dtype -> the same."""
        return self.kernel(gate, up, self.limit)


class ClampedFeedForward(FeedForward):
    """The dense layers and the shared expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        activation: ClampedSwiglu.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.activation = config.activation.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.activation(self.w1(x), self.w3(x)))


class ClampedGroupedExperts(GroupedExperts):
    """All routed experts of a rank; input and weights are of one dtype, and so is the output."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        activation: ClampedSwiglu.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.activation = config.activation.build()

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert (R, D) -> (R, D); counts (E,) add up to R."""
        ends = num_tokens_per_expert_E.cumsum(0).int()
        gate = grouped_mm(x_RD, self.w1_EFD, ends)
        up = grouped_mm(x_RD, self.w3_EFD, ends)
        return grouped_mm(self.activation(gate, up), self.w2_EDF, ends)
