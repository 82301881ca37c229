"""RMS norms that round where GLM-5.3-Flash's do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn as nn
from torchtitan.models.common import RMSNorm
from torchtitan.protocols.module import Module

from kernels.norms import gated_rms_norm_reference, rms_norm_reference


class CastFirstRMSNorm(RMSNorm):
    """Normalises in float32, rounds to the input's dtype, then multiplies by the weight.

    torch's own module multiplies before it rounds, which differs in bfloat16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    kernel: ClassVar[Callable[..., torch.Tensor]] = staticmethod(rms_norm_reference)
    """What computes it: a function like ``kernels.norms.rms_norm``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.kernel(input, self.weight, self.eps)


class GatedRMSNorm(Module):
    """``rms(x) * weight * sigmoid(gate)`` over the last axis, in float32, rounded once at the end.

    The norm of KDA's output, per head.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        normalized_shape: int
        eps: float

    kernel: ClassVar[Callable[..., torch.Tensor]] = staticmethod(gated_rms_norm_reference)
    """What computes it: a function like ``kernels.norms.gated_rms_norm``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.normalized_shape))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``x`` and ``gate`` are (..., normalized_shape); returns the dtype of ``x``."""
        return self.kernel(x, gate, self.weight, self.eps)
