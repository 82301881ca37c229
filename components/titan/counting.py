"""Token counts of experts, where layers run more than once for one forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torchtitan.models.common.moe import MoE


@contextmanager
def counting_nothing(module: nn.Module) -> Iterator[None]:
    """Leave the counts of the experts in ``module`` as they are while it runs again.

    torchtitan's bias update corrects its own checkpointing by halving; it leaves layers that are
    recomputed here as they are, so they must count once.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    counts = [layer.tokens_per_expert_E for layer in layers]
    for layer in layers:
        layer.tokens_per_expert_E = torch.zeros_like(layer.tokens_per_expert_E)
    try:
        yield
    finally:
        for layer, count in zip(layers, counts, strict=True):
            layer.tokens_per_expert_E = count
