"""Pools of consecutive keys, which the indexer scores in place of single keys."""

from typing import NamedTuple

import torch


class Pools(NamedTuple):
    """The complete pools of all documents, numbered through the batch.

    Attributes:
        first: int64 (P,), flat index of each pool's first token.
        before: int64 (T,), pools of all earlier documents, for each token: its document's pool p
            is pool ``before + p`` here.
    """

    first: torch.Tensor
    before: torch.Tensor


def find_pools(lengths: tuple[int, ...], size: int, device: torch.device) -> Pools:
    """Cut every document into pools of ``size`` tokens; a rest that fills no pool has none.

    Args:
        lengths: tokens of the documents, one after the other.
        size: tokens per pool, >= 1.
    """
    length = torch.tensor(lengths, dtype=torch.int64)
    count = length // size
    before = count.cumsum(0) - count
    start = length.cumsum(0) - length
    total = int(count.sum())
    # Within a document, pool p begins size * p after the start; p counts from `before`.
    shift = (start - size * before).repeat_interleave(count, output_size=total)
    first = shift + size * torch.arange(total)
    each = before.repeat_interleave(length, output_size=int(length.sum()))
    return Pools(first.to(device, non_blocking=True), each.to(device, non_blocking=True))


def pool_keys(
    keys: torch.Tensor, gates: torch.Tensor, ape: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """One key per pool: a weighted mean of its tokens' keys, with weights per channel.

    Args:
        keys: (T, d).
        gates: (T, d), raw weights of the tokens.
        ape: (size, d), added to the raw weights by place in the pool.
        first: int64 (P,), flat index of each pool's first token.

    Returns:
        (P, d) in the dtype of ``keys``. The softmax is taken in float32 and rounded.
    """
    tokens = first.unsqueeze(1) + torch.arange(ape.shape[0], device=first.device)
    wide = torch.promote_types(gates.dtype, torch.float32)
    weights = (gates[tokens].to(wide) + ape.to(wide)).softmax(1)
    return (weights.to(keys.dtype) * keys[tokens]).sum(1)
