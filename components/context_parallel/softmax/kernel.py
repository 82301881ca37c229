"""Attention of consecutive queries to consecutive keys of a batch: what every method is made of.

Keys of a query may lie in several blocks. Backward of one block therefore takes what is known of
all of them: the log-sum-exp over all keys, and per query ``shift``, the product of output and
output gradient less the gradient of the log-sum-exp. With p = exp(score - lse), the gradient of a
score is p (grad_out . v - shift).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from kernels.position.alibi import DistanceBias
from kernels.precision import accumulation_dtype
from kernels.row_blocks import row_blocks

Outputs = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Scores:
    """What a layer makes of q . k.

    Attributes:
        scale: factor.
        window: a query sees this many tokens, itself the last; None: its whole document up to it.
        slopes: float32 (N,), ALiBi's rates of the query heads, or None.
    """

    scale: float
    window: int | None = None
    slopes: torch.Tensor | None = None

    def of_heads(self, heads: slice) -> "Scores":
        """The same for some of the query heads."""
        slopes = None if self.slopes is None else self.slopes[heads]
        return Scores(self.scale, self.window, slopes)


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive tokens of a batch as queries, and others as keys.

    A query sees keys of its document up to itself.

    Attributes:
        start: int64 (queries,), where in the batch their documents start.
        first_query, first_key: places in the batch.
        keys: how many.
        batch: what stands for the batch; kernels may remember by it what they derive from a block,
            for as long as it lives.
    """

    start: torch.Tensor
    first_query: int
    first_key: int
    keys: int
    batch: object | None = None

    def query_places(self) -> torch.Tensor:
        """int64 (queries,): places in the batch."""
        begin = self.first_query
        return torch.arange(begin, begin + len(self.start), device=self.start.device)

    def key_places(self) -> torch.Tensor:
        """int64 (keys,): places in the batch."""
        begin = self.first_key
        return torch.arange(begin, begin + self.keys, device=self.start.device)

    def bias(self, scores: Scores) -> DistanceBias | None:
        """ALiBi's, by distances in the batch; or None."""
        if scores.slopes is None:
            return None
        return DistanceBias(scores.slopes, self.query_places(), self.key_places())


class Kernel(ABC):
    """Forward and backward of a block. q: (queries, N, H); k: (keys, M, H), N a multiple of M, head
    n reading key head n // (N / M); v: (keys, M, Hv)."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scores: Scores
    ) -> Outputs:
        """Attention over the keys of the block alone.

        Returns:
            Output (queries, N, Hv) in the dtype of q or a wider one, and log-sum-exp (queries, N)
            in ``accumulation_dtype``. A query without a key has zeros and -inf.
        """

    @abstractmethod
    def backward(
        self,
        grad_out: torch.Tensor,
        shift: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block: Block,
        scores: Scores,
    ) -> Gradients:
        """What the block adds to the gradients of q, k and v.

        In their dtype, or a wider one: a sum of several is to be kept in ``accumulation_dtype``.

        Args:
            grad_out: (queries, N, Hv), of the output over all keys.
            shift: (queries, N), see the module.
            lse: (queries, N), over all keys; -inf for a query that has none.
        """

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scores: Scores
    ) -> Outputs:
        """``forward`` of a block that holds all keys of its queries; differentiable."""
        return _Attention.apply(self, block, scores, q, k, v)


def shift_of(
    out: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None
) -> torch.Tensor:
    """``shift``, (queries, N), from an output, its gradient and the log-sum-exp's, if it has one"""
    shift = out.new_empty(out.shape[:-1], dtype=accumulation_dtype(out.dtype))
    # A block at a time: wider copies of all would be the most that backward holds.
    for rows in row_blocks(len(out), out[:1].numel()):
        shift[rows] = (out[rows].to(shift.dtype) * grad_out[rows]).sum(-1)
    return shift if grad_lse is None else shift - grad_lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        block: Block,
        scores: Scores,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Outputs:
        ctx.set_materialize_grads(False)
        out, lse = kernel.forward(q, k, v, block, scores)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.block, ctx.scores = kernel, block, scores
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        shift = shift_of(out, grad_out, grad_lse)
        grads = ctx.kernel.backward(grad_out, shift, lse, *tensors, ctx.block, ctx.scores)
        return None, None, None, *(g.to(t.dtype) for g, t in zip(grads, tensors, strict=True))


class PlainKernel(Kernel):
    """Plain torch, on any device, in ``accumulation_dtype``. Scores are held for some queries at a
    time."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scores: Scores
    ) -> Outputs:
        """See ``Kernel``."""
        wide = accumulation_dtype(q.dtype)
        groups, k, v = q.shape[1] // k.shape[1], k.to(wide), v.to(wide)
        out = q.new_empty(*q.shape[:2], v.shape[2], dtype=wide)
        lse = q.new_empty(q.shape[:2], dtype=wide)
        for rows in row_blocks(len(q), q.shape[1] * len(k)):
            some = _scores(q[rows], k, block, rows, scores)
            total = some.logsumexp(-1)
            weights = torch.exp(some - _reachable(total).unsqueeze(-1))
            out[rows] = _to_rows(_by_key_head(weights, groups) @ v.transpose(0, 1), groups)
            lse[rows] = total.t()
        return out, lse

    def backward(
        self,
        grad_out: torch.Tensor,
        shift: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block: Block,
        scores: Scores,
    ) -> Gradients:
        """See ``Kernel``."""
        wide = accumulation_dtype(q.dtype)
        k, v, groups = k.to(wide), v.to(wide), q.shape[1] // k.shape[1]
        grad_q = q.new_empty(q.shape, dtype=wide)
        # Heads first, as the products have them.
        grad_k, grad_v = (torch.zeros_like(t.transpose(0, 1)) for t in (k, v))
        for rows in row_blocks(len(q), q.shape[1] * len(k)):
            some = _scores(q[rows], k, block, rows, scores)
            weights = torch.exp(some - _reachable(lse[rows].t()).unsqueeze(-1))
            weights = _by_key_head(weights, groups)
            upstream = _from_rows(grad_out[rows].to(wide), groups)
            grad_v += weights.transpose(1, 2) @ upstream
            of_weights = upstream @ v.permute(1, 2, 0)
            of_scores = weights * (of_weights - _from_rows(shift[rows].unsqueeze(-1), groups))
            of_scores = of_scores * scores.scale
            grad_q[rows] = _to_rows(of_scores @ k.transpose(0, 1), groups)
            grad_k += of_scores.transpose(1, 2) @ _from_rows(q[rows].to(wide), groups)
        return grad_q, grad_k.transpose(0, 1), grad_v.transpose(0, 1)


def _reachable(lse: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf: what is subtracted from the scores of a query that sees nothing."""
    return lse.where(lse.isfinite(), 0)


def _from_rows(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """(queries, N, H) -> (M, groups x queries, H)."""
    return _by_key_head(rows.transpose(0, 1), groups)


def _to_rows(products: torch.Tensor, groups: int) -> torch.Tensor:
    """The inverse of ``_from_rows``."""
    return products.unflatten(1, (groups, -1)).flatten(0, 1).transpose(0, 1)


def _by_key_head(heads: torch.Tensor, groups: int) -> torch.Tensor:
    """(N, queries, ...) -> (M, groups x queries, ...)."""
    return heads.unflatten(0, (-1, groups)).flatten(1, 2)


def _scores(
    q: torch.Tensor, k: torch.Tensor, block: Block, rows: slice, scores: Scores
) -> torch.Tensor:
    """(N, queries, keys), -inf where a key is not seen. ``rows``: which of the block's queries."""
    groups = q.shape[1] // k.shape[1]
    products = _from_rows(q.to(k.dtype), groups) @ k.permute(1, 2, 0)
    found = products.unflatten(1, (groups, -1)).flatten(0, 1) * scores.scale
    bias = block.bias(scores)
    if bias is not None:
        found = found + bias.rows(rows.start, rows.stop, block.keys)
    queries, keys = block.query_places()[rows, None], block.key_places()
    seen = (keys >= block.start[rows, None]) & (keys <= queries)
    if scores.window is not None:
        seen &= queries - keys < scores.window
    return found.masked_fill(~seen, -math.inf)
