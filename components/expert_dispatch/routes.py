"""Routes of tokens to experts."""

import torch


def count_routes(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Routes to each expert: int64 (experts,). A token that visits an expert twice counts twice.

    Args:
        ids: int64, any shape, in [0, experts).
        experts: how many there are.
    """
    chosen = ids.flatten()
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))
