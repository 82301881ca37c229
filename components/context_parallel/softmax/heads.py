"""Attention with heads split over ranks: each has all tokens for its share of the heads.

DeepSpeed Ulysses (arXiv 2309.14509). Key heads fewer than ranks, or not a multiple of them, are
sent in copies, as few as make them one; the gradients of a head's copies are summed where its
tokens are.
"""

from dataclasses import dataclass
from math import gcd

import torch

from components.context_parallel.collectives import (
    exchange_rows,
    to_batch_order,
    to_packed_order,
)
from components.context_parallel.layout import DEGREE
from components.context_parallel.share import Share
from components.context_parallel.softmax.kernel import Block, Kernel, Scores


@dataclass(frozen=True)
class HeadSplit:
    """How many heads each of ``ranks`` ranks gets.

    Raises:
        ValueError: query heads do not divide by the ranks; with the degrees that they divide by.
    """

    heads: int
    key_heads: int
    ranks: int

    def __post_init__(self) -> None:
        if self.heads % self.ranks:
            legal = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise ValueError(
                f"{DEGREE}: {self.ranks} ranks cannot split {self.heads} query heads; "
                f"legal for 'ulysses': {legal}"
            )

    @property
    def own(self) -> int:
        """Query heads of a rank."""
        return self.heads // self.ranks

    @property
    def copies(self) -> int:
        """Copies of every key head; a divisor of the query heads that share it."""
        return self.ranks // gcd(self.key_heads, self.ranks)

    @property
    def own_keys(self) -> int:
        """Key heads of a rank, copies counted."""
        return self.key_heads * self.copies // self.ranks

    def of(self, rank: int) -> slice:
        """The query heads of a rank."""
        return slice(rank * self.own, (rank + 1) * self.own)


def attend_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    share: Share,
    scores: Scores,
    kernel: Kernel,
    need_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``gathered.attend_fetched``; the log-sum-exp returns, and travels, if it is needed.

    Raises:
        ValueError: the query heads do not divide by the ranks.
    """
    layout, ranks = share.layout, share.layout.ranks
    split = HeadSplit(q.shape[1], k.shape[1], ranks)
    k, v = (t.repeat_interleave(split.copies, 1) for t in (k, v))
    # Rows for rank 0 first: (ranks, n, what a rank's heads need).
    apart = [t.unflatten(1, (ranks, -1)).flatten(2) for t in (q, k, v)]
    rows = torch.cat(apart, -1).transpose(0, 1).flatten(0, 1)
    rows = exchange_rows(rows, [len(q)] * ranks, layout.order.sizes, share.link, "softmax.heads")
    rows = to_batch_order(rows, layout.order)
    q, k, v = (
        some.unflatten(1, (heads, -1))
        for some, heads in zip(
            rows.split([t.shape[2] for t in apart], -1),
            (split.own, split.own_keys, split.own_keys),
            strict=True,
        )
    )
    block = Block(share.documents.start, 0, 0, layout.tokens, share)
    out, lse = kernel.attend(q, k, v, block, scores.of_heads(split.of(share.rank)))
    returned = _return_rows(out, share, "softmax.outputs")
    return returned, _return_rows(lse, share, "softmax.lse") if need_lse else None


def _return_rows(whole: torch.Tensor, share: Share, name: str) -> torch.Tensor:
    """(all tokens, a rank's heads, ...) -> (this rank's tokens, all heads, ...)."""
    order, ranks, own = share.layout.order, share.layout.ranks, len(share.index)
    rows = to_packed_order(whole, order)
    rows = exchange_rows(rows, order.sizes, [own] * ranks, share.link, name)
    return rows.unflatten(0, (ranks, own)).transpose(0, 1).flatten(1, 2)
