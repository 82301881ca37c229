"""Which tokens a query attends to: those of its chosen pools, and its document's unfinished one."""

import torch


def selected_tokens(
    pools: torch.Tensor, position: torch.Tensor, start: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the chosen pools, then the tail: the tokens after the last complete pool.

    The tail is open to the query that lies in it, up to the query itself; a query that completes a
    pool has none, and sees itself only if that pool is chosen.

    Args:
        pools: int32 (Q, n), chosen pools counted from the document's start; -1 for none.
        position: int64 (Q,), distance from the document's start.
        start: int64 (Q,), flat index of the document's first token.
        size: tokens per pool.

    Returns:
        int64 (Q, n * size + size - 1), flat indices, and bool of the same shape: the slot is used.
        An unused slot holds the document's first token.
    """
    slot = torch.arange(size, device=pools.device)
    inside = pools.long().unsqueeze(2) * size + slot
    inside = inside.flatten(1)
    used = inside >= 0
    seen = position.unsqueeze(1) + 1
    tail = seen // size * size + slot[:-1]
    offset = torch.cat([inside, tail], 1)
    used = torch.cat([used, tail < seen], 1)
    return start.unsqueeze(1) + torch.where(used, offset, 0), used
