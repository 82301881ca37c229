"""RMS norms that round where GLM-5.3-Flash's do."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchtitan.models.common import RMSNorm
from torchtitan.protocols.module import Module


class CastFirstRMSNorm(RMSNorm):
    """Normalises in float32, rounds to the input's dtype, then multiplies by the weight.

    torch's own module multiplies before it rounds, which differs in bfloat16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(input, self.normalized_shape, None, self.eps) * self.weight


class GatedRMSNorm(Module):
    """``rms(x) * weight * sigmoid(gate)`` over the last axis, in float32, rounded once at the end.

    The norm of KDA's output, per head.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        normalized_shape: int
        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.normalized_shape))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``x`` and ``gate`` are (..., normalized_shape); returns the dtype of ``x``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return (normed * gate.to(wide).sigmoid()).to(x.dtype)
