"""The short causal convolution in front of KDA."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn as nn
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from kernels.short_conv.naive import short_conv


class ShortConv(Module):
    """SiLU of a depthwise causal convolution that sees nothing before the document's start.

    Weight and arithmetic are float32; the result is rounded to the input's dtype.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        channels: int
        kernel_size: int

    kernel: ClassVar[Callable[..., torch.Tensor]] = staticmethod(short_conv)
    """What computes it: a function like ``kernels.short_conv.naive.short_conv``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.channels, 1, config.kernel_size, dtype=torch.float32)
        )

    def forward(self, x: torch.Tensor, documents: Documents) -> torch.Tensor:
        """(T, channels) -> (T, channels)."""
        return self.kernel(x, self.weight, documents.position, documents.lengths)
