"""Where each query's keys lie, in the order in which the kernels walk through them."""

import torch


def row_plan(
    pools: torch.Tensor, position: torch.Tensor, start: torch.Tensor, size: int
) -> torch.Tensor:
    """A query's slots: the tokens of its chosen pools, then at once those of its unfinished one.

    Args:
        pools: int32 (Q, n), ascending, then -1.
        position: int (Q,), distance from the document's start; -1 for a query without keys.
        start: int (Q,), flat index of the document's first token.
        size: tokens per pool.

    Returns:
        int32 (Q, 4): chosen pools, slots in use, ``start``, flat index of the first token of the
        unfinished pool.
    """
    used = (pools >= 0).sum(1, dtype=torch.int32)
    seen = position.to(torch.int32) + 1
    unfinished = seen % size
    start = start.to(torch.int32)
    return torch.stack([used, used * size + unfinished, start, start + seen - unfinished], 1)


def slot_tokens(plan: torch.Tensor, pools: torch.Tensor, size: int, slots: int) -> torch.Tensor:
    """int64 (Q, slots): flat token of each slot, -1 where a query has fewer.

    Args:
        plan: int32 (Q, 4), from ``row_plan``.
        pools: int32 (Q, n), n >= 1.
        size: tokens per pool.
        slots: how many to list.
    """
    used, count, start, unfinished = plan.long().unsqueeze(2).unbind(1)
    slot = torch.arange(slots, device=plan.device).unsqueeze(0)
    group = slot // size
    chosen = pools.long().gather(1, group.clamp(max=pools.shape[1] - 1).expand(len(plan), -1))
    token = torch.where(group < used, start + chosen * size, unfinished) + slot % size
    return torch.where(slot < count, token, -1)
