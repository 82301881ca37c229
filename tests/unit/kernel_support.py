"""Inputs for tests of kernels."""

import torch


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers that depend on nothing but the arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
