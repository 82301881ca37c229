"""Attention of one layer with the sequence split over ranks, by the method of the run's choice."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from components.context_parallel.layout import DEGREE
from components.context_parallel.share import Share
from components.context_parallel.softmax.fetch import GatherAll, SendSeen
from components.context_parallel.softmax.gathered import attend_fetched
from components.context_parallel.softmax.heads import HeadSplit, attend_heads
from components.context_parallel.softmax.kernel import Kernel, Scores
from components.context_parallel.softmax.ring import attend_ring
from components.context_parallel.softmax.rings import Rings, check_width

Method = Literal["ulysses", "all_gather", "ring", "double_ring", "window"]

METHODS = get_args(Method)


@dataclass(frozen=True)
class Exchange:
    """What ranks exchange.

    Attributes:
        method: "ulysses": tokens for heads. "all_gather": every rank gets all keys and values.
            "ring": they go round. "double_ring": in inner and outer rings. "window": every part
            gets the keys and values that it sees.
        inner_ring: ranks of an inner ring of "double_ring", neighbours in the group.

    Raises:
        ValueError: no such method, or ``inner_ring`` beside another than "double_ring", or none.
    """

    method: Method
    inner_ring: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: {self.method!r}; legal: {', '.join(METHODS)}")
        if (self.inner_ring is None) == (self.method == "double_ring"):
            legal = "1 rank or more" if self.method == "double_ring" else "none"
            raise ValueError(
                f"inner_ring: {self.inner_ring} beside method {self.method!r}; legal: {legal}"
            )

    def of_layer(self, window: int | None) -> "Exchange":
        """What a layer exchanges: one with a window nothing beyond it, whatever the others do."""
        return self if window is None else Exchange("window")

    def check(self, heads: int, key_heads: int, ranks: int) -> None:
        """Raise ValueError unless ``ranks`` can share a layer of these heads; with the degrees, or
        the inner rings, that are legal."""
        if ranks < 1:
            raise ValueError(f"{DEGREE}: {ranks}; legal: 1 or more")
        if self.method == "ulysses":
            HeadSplit(heads, key_heads, ranks)
        if self.inner_ring is not None:
            check_width(self.inner_ring, ranks)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    share: Share,
    exchange: Exchange,
    scores: Scores,
    kernel: Kernel,
    need_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's queries over all keys of their documents up to themselves; differentiable.

    Equals one process up to rounding: scores, log-sum-exps and sums over keys are in float32
    (float64 for float64). All ranks call alike.

    Args:
        q: (n, N, H), after the position encoding, with positions within the documents.
        k: (n, M, H), alike; N a multiple of M, head n reads key head n // (N / M).
        v: (n, M, Hv).
        share: of n tokens.
        need_lse: whether the log-sum-exp is wanted; "ulysses" has to send it.

    Returns:
        Output (n, N, Hv) in q's dtype, and log-sum-exp (n, N) in ``accumulation_dtype``, which may
        be None if it is not needed.

    Raises:
        ValueError: other rows, or heads or ranks that the method cannot split.
    """
    for t in (q, k, v):
        share.check_rows(t)
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"heads: {q.shape[1]} of queries, {k.shape[1]} of keys, {v.shape[1]} of values; legal: "
            "as many of values as of keys, and a multiple of them of queries"
        )
    exchange.check(q.shape[1], k.shape[1], share.layout.ranks)
    if exchange.method == "ulysses":
        return attend_heads(q, k, v, share, scores, kernel, need_lse)
    if exchange.method in ("ring", "double_ring"):
        rings = Rings.of(share.link, exchange.inner_ring or share.layout.ranks)
        return attend_ring(q, k, v, share, rings, scores, kernel)
    fetch = SendSeen() if exchange.method == "window" else GatherAll()
    return attend_fetched(q, k, v, share, fetch, scores, kernel)
