"""Model parts without a trainer, and torchtitan's container over streamed optimizers for them."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from components.titan.optimizer import AdamWSettings
from components.titan.streamed_optimizer import StreamedOptimizers

OWNER = "components.offload_stream_adamw"


def parts() -> list[nn.Module]:
    """Two, as a rank has them whose pipeline stages alternate; one weight is frozen."""
    torch.manual_seed(0)
    first = nn.Sequential(OrderedDict(a=nn.Linear(9, 7), b=nn.Linear(7, 5, bias=False)))
    second = nn.Sequential(OrderedDict(c=nn.Linear(5, 3), d=nn.LayerNorm(3)))
    first.a.bias.requires_grad_(False)
    return [first, second]


def streamed(model_parts: list[nn.Module], **settings: Any) -> StreamedOptimizers:
    return config(**settings).build(model_parts=model_parts)


def config(**settings: Any) -> StreamedOptimizers.Config:
    chosen = {
        "bucket_parameters": 64, "slots": 2, "split": 0.5, "cpu_threads": 1,
        "host_budget": None, "nonfinite": "raise", "owner": OWNER, **settings,
    }  # fmt: skip
    groups = AdamWSettings(lr=0.1).container().param_groups
    return StreamedOptimizers.Config(param_groups=groups, **chosen)


def backward(model_parts: list[nn.Module], seed: int) -> None:
    hidden = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
    for part in model_parts:
        hidden = part(hidden)
    hidden.square().sum().backward()
