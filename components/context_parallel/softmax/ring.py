"""Attention whose keys go round rings of ranks, which hold three ranks' at most, or five in two.

Ring attention (arXiv 2310.01889): every rank meets every rank's keys and values once, and folds
what its queries see of them into running outputs and log-sum-exps, in full precision. In backward
they go round again, and the gradients of keys and values travel along, in full precision, until
they are home. Blocks in which nothing is seen are not computed: under a causal mask a zigzag layout
leaves all ranks the same number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from components.context_parallel.share import Share
from components.context_parallel.softmax.gathered import no_tokens, pack, unpack
from components.context_parallel.softmax.kernel import (
    Block,
    Gradients,
    Kernel,
    Outputs,
    Scores,
    shift_of,
)
from components.context_parallel.softmax.reach import (
    Reach,
    add_leaving,
    cross_block,
    own_block,
)
from components.context_parallel.softmax.rings import Rings, go_round
from components.vocabulary.ring import RidingSum
from kernels.packed import bounds
from kernels.precision import accumulation_dtype


def attend_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    share: Share,
    rings: Rings,
    scores: Scores,
    kernel: Kernel,
) -> Outputs:
    """See ``gathered.attend_fetched``."""
    return _RingAttention.apply(share, rings, scores, kernel, q, k, v)


@dataclass(frozen=True, eq=False)
class _Meetings:
    """What a rank's queries see of the rows that it meets."""

    share: Share
    reach: Reach

    def own(self) -> Iterator[tuple[Block, slice, slice]]:
        """Blocks of own parts, each by itself, then an earlier one: block, queries' rows, keys'"""
        for part, rows in self._rows.items():
            yield own_block(self.share, part, 0), rows, rows
        yield from self._cross({p: rows.stop for p, rows in self._rows.items()})

    def others(self, rank: int) -> Iterator[tuple[Block, slice, slice]]:
        """Blocks with the rows that leave ``rank``."""
        held = self.share.layout.held(rank)
        stops = bounds(tuple(self.reach.leaving(p) for p in held))[1:]
        yield from self._cross(dict(zip(held, stops, strict=True)))

    def _cross(self, stops: dict[int, int]) -> Iterator[tuple[Block, slice, slice]]:
        """``stops``: where rows of each part that is met end."""
        for part, rows in self._rows.items():
            for before, stop in stops.items():
                if self.reach.seen(part, before):
                    block = cross_block(self.share, self.reach, part, before)
                    queries = slice(rows.start, rows.start + len(block.start))
                    yield block, queries, slice(stop - block.keys, stop)

    @property
    def _rows(self) -> dict[int, slice]:
        return dict(zip(self.share.layout.held(self.share.rank), self.share.rows, strict=True))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        share: Share,
        rings: Rings,
        scores: Scores,
        kernel: Kernel,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Outputs:
        ctx.set_materialize_grads(False)
        reach = Reach(share.layout, scores.window)
        meetings, rows = _Meetings(share, reach), pack(k, v)
        leaving = [reach.leaving_of(rank) for rank in range(share.layout.ranks)]
        wide = accumulation_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=wide)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        for _, members in go_round(rings, _leave(rows, share, reach), leaving, "forward"):
            for rank, held in members:
                mine = rank == share.rank
                blocks = meetings.own() if mine else meetings.others(rank)
                for block, queries, keys in blocks:
                    some = unpack((rows if mine else held)[keys], k, v)
                    # No name for what is found: it would stay until the next block's is there.
                    _fold(
                        out[queries],
                        lse[queries],
                        *kernel.forward(q[queries], *some, block, scores),
                    )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, rows, out, lse)
        ctx.keys_values = no_tokens(k, v)
        ctx.share, ctx.rings, ctx.scores, ctx.kernel = share, rings, scores, kernel
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, rows, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        turn = _Backward(ctx, q, rows, lse, grad_out, shift_of(out, grad_out, grad_lse))
        turn.go_round()
        k, v = ctx.keys_values
        grad_k, grad_v = unpack(turn.own, k, v)
        grads = turn.grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
        return None, None, None, None, *grads


def _leave(rows: torch.Tensor, share: Share, reach: Reach) -> torch.Tensor:
    """The rows that leave; no copy where they are next to each other."""
    leaving = [some for some in reach.leaving_rows(share.rank) if some.stop > some.start]
    if all(a.stop == b.start for a, b in pairwise(leaving)):
        return rows[leaving[0].start : leaving[-1].stop] if leaving else rows[:0]
    return torch.cat([rows[some] for some in leaving])


def _fold(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Add more keys to an attention, in place. Either may have seen none: -inf, but not both."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    # Of mixed precisions: no wider copy of ``more`` is made.
    out.addcmul_(more, torch.exp(more_lse - total).unsqueeze(-1))
    lse.copy_(total)


class _Backward:
    """One backward pass: ``grad_q`` and ``own`` are this rank's gradients, in full precision."""

    def __init__(
        self,
        ctx: Any,
        q: torch.Tensor,
        rows: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        shift: torch.Tensor,
    ) -> None:
        self.share, self.rings = ctx.share, ctx.rings
        self.scores, self.kernel = ctx.scores, ctx.kernel
        self.reach = Reach(self.share.layout, self.scores.window)
        self.meetings = _Meetings(self.share, self.reach)
        self.q, self.rows, self.keys_values = q, rows, ctx.keys_values
        self.lse, self.grad_out, self.shift = lse, grad_out, shift
        self.grad_q = shift.new_zeros(q.shape)
        self.own = shift.new_zeros(self.rows.shape)
        ranks = range(self.share.layout.ranks)
        self.leaving = [self.reach.leaving_of(rank) for rank in ranks]

    def go_round(self) -> None:
        """Meet all ranks' rows. Sums ride round the inner ring; what they come to rides round the
        outer one. Neither begins with the rank's own, which it adds at the end."""
        mine = _leave(self.rows, self.share, self.reach)
        home: torch.Tensor | None = None
        outer = self._sums(self.rings.outer("ring_gradients", "backward"), self.rings.peers(), 1)
        for ring, members in go_round(self.rings, mine, self.leaving, "backward"):
            if ring == self.rings.own:
                home = self._inner_round(ring, members, first=1)
            else:
                part = outer.begin()
                total = self._inner_round(ring, members, first=0)
                assert total is not None
                part.copy_(total)
                del total  # it would stay until the next one is there
                outer.end()
        if self.rings.outer_size > 1:
            arrived = outer.home()
            home = arrived if home is None else home.add_(arrived)
        if home is not None:
            add_leaving(self.own, home, self.share, self.reach)

    def _inner_round(
        self, ring: int, members: Iterator[tuple[int, torch.Tensor]], first: int
    ) -> torch.Tensor | None:
        """What this rank's inner ring has for the rows of rank ``ring``'s member of its number."""
        inner = self.rings.inner("ring_gradients", "backward")
        sums = self._sums(inner, self.rings.members(ring), first)
        for rank, held in members:
            if rank == self.share.rank:
                self._add(self.meetings.own(), self.rows, self.own)
                continue
            part = sums.begin()
            self._add(self.meetings.others(rank), held, part.zero_())
            sums.end()
        return None if first and inner.size == 1 else sums.home()

    def _sums(self, ring: Any, ranks: range, first: int) -> RidingSum:
        rows, width = [self.leaving[rank] for rank in ranks], self.rows.shape[1]
        return RidingSum(ring, rows, width, self.rows, self.own.dtype, first)

    def _add(
        self, blocks: Iterator[tuple[Block, slice, slice]], held: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """Add gradients of blocks whose keys are rows of ``held`` to the same rows of ``sums``."""
        for block, queries, keys in blocks:
            totals = self.grad_q[queries], *unpack(sums[keys], *self.keys_values)
            some = unpack(held[keys], *self.keys_values)
            _add_each(totals, self._gradients(queries, some, block))

    def _gradients(
        self, queries: slice, keys_values: tuple[torch.Tensor, torch.Tensor], block: Block
    ) -> Gradients:
        return self.kernel.backward(
            self.grad_out[queries],
            self.shift[queries],
            self.lse[queries],
            self.q[queries],
            *keys_values,
            block,
            self.scores,
        )


def _add_each(totals: Gradients, grads: Gradients) -> None:
    """In place; narrower ones are not copied first."""
    for total, grad in zip(totals, grads, strict=True):
        total.add_(grad)
