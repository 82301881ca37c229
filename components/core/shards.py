"""Tensors that may be sharded over ranks."""

import torch
from torch.distributed.tensor import DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without a graph: the memory itself, no copy of it."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
