"""Collectives over whole tensors, one part per rank along a new first dimension."""

import torch
import torch.distributed as dist


def start_gather(parts: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Fill ``parts`` (ranks, *mine.shape), contiguous, with every rank's ``mine``, contiguous."""
    # Flat: not every backend takes an output with one dimension more than the input.
    work = dist.all_gather_single(parts.view(-1), mine.view(-1), group=group, async_op=True)
    assert work is not None
    return work


def gather(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's ``mine``, which has the same shape on all: (ranks, *mine.shape)."""
    parts = mine.new_empty(dist.get_world_size(group), *mine.shape)
    start_gather(parts, mine.contiguous(), group).wait()
    return parts


def start_sum(mine: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Fill ``mine`` with this rank's row of the sum of ``parts`` (ranks, *mine.shape) of all ranks;
    both contiguous."""
    work = dist.reduce_scatter_single(mine.view(-1), parts.view(-1), group=group, async_op=True)
    assert work is not None
    return work


def swap(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From (ranks, ...), contiguous, one part for each rank, what each rank has for this one."""
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out
