"""Least-loaded expert parallelism as published (arXiv 2601.17111), a peer of ours.

One exchange each way under plain autograd, so everything that was dispatched and computed is kept
for backward: rows where they are computed, their activations and outputs, returned rows. Copies of
weights, and gradients of copies, move in functions of autograd. The plan is this project's: at
capacity factor 1 it moves as many rows as the published one, and no expert twice to one rank.

Better to the peer than its own code in what is no part of the idea: no barrier before weights move,
one host read per layer, no ids on the wire (counts tell them), tokens gathered once instead of
repeated first, no gradient buffer on a rank that lends nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call
from torchtitan.config import derive
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import RoutedExperts

from components.expert_dispatch.counts import gather_counts
from components.expert_dispatch.exchange import Placement, exchange
from components.expert_dispatch.layer_plan import PlanRule
from components.expert_dispatch.partition import WHOLE
from components.expert_dispatch.plan import Plan
from components.expert_dispatch.weights import weight_group


class PublishedLlepExperts(RoutedExperts):
    """``RoutedExperts`` under a plan, as published. Weights are plain tensors of this rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        minimum_rows: int
        """See ``PlanRule``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rule = PlanRule(minimum_rows=config.minimum_rows)

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Tokens (B, L, D), weights (B, L, K), expert ids (B, L, K) -> (B, L, D)."""
        routing = x_BLD, topk_scores_BLK, topk_expert_ids_BLK
        x, weights, ids = (tensor.flatten(0, 1) for tensor in routing)
        group = self.token_dispatcher.ep_mesh.get_group()
        rank, top_k = dist.get_rank(group), ids.shape[1]
        counts = gather_counts(ids, self.token_dispatcher.num_experts, WHOLE, group)[:, 0]
        plan = self.rule.plan(counts.sum(0), len(counts))
        copies = _Copies(plan, rank, weight_group(group))
        *foreign, anchor = _Migrated.apply(copies, *self.inner_experts.parameters())

        moves = exchange(plan, counts)
        there = moves.sent(rank), moves.received(rank), group
        back = moves.received(rank), moves.sent(rank), group
        holding = Placement.of(plan, ids.device).holdings(ids, counts, rank)
        order = holding.flatten().argsort(stable=True)
        arrival = _by_holding(moves.arrivals(rank), ids.device)
        rows = _Permuted.apply(_Moved.apply(_Spread.apply(x, order, top_k), *there), arrival)
        of_rows = _Moved.apply(weights.flatten()[order], *there)[arrival]
        copies.wait()
        out = self._computed(rows, moves.rows.sum(0)[plan.of_rank(rank)], foreign)
        del rows
        out = out * of_rows.to(out.dtype).unsqueeze(1)
        out = _Moved.apply(_Permuted.apply(out, _inverse(arrival)), *back)
        out = _Permuted.apply(out, _inverse(order)).view(len(x), top_k, x.shape[1]).sum(1)
        return (out + anchor).view(x_BLD.shape)

    def _computed(
        self, rows: torch.Tensor, held: torch.Tensor, foreign: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Rows sorted by holding (R, D), rows of each holding -> (R, D)."""
        own = len(held) - len(foreign[0])
        cut = int(held[:own].sum())
        held = held.to(rows.device, non_blocking=True)
        names = [name for name, _ in self.inner_experts.named_parameters()]
        with maybe_set_sparse_mesh():
            native = self.inner_experts(rows[:cut], held[:own])
            if not len(foreign[0]):
                return native
            weights = dict(zip(names, foreign, strict=True))
            others = functional_call(self.inner_experts, weights, (rows[cut:], held[own:]))
        return torch.cat([native, others])


def published_llep(cfg: RoutedExperts.Config, *, minimum_rows: int) -> PublishedLlepExperts.Config:
    return derive(cfg, PublishedLlepExperts.Config, minimum_rows=minimum_rows)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def _by_holding(arrivals: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Arrived rows, source by source (P, held), in the order of holdings: int64 (R,)."""
    total = int(arrivals.sum())
    holding = torch.arange(arrivals.shape[1], device=device).repeat(len(arrivals))
    sizes = arrivals.flatten().to(device)
    return holding.repeat_interleave(sizes, output_size=total).argsort(stable=True)


class _Spread(torch.autograd.Function):
    """Tokens (T, D) -> the rows of their routes in some order (T k, D)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        by_route = grad[_inverse(order)].unflatten(0, (len(grad) // ctx.top_k, ctx.top_k))
        return by_route.sum(1), None, None


class _Permuted(torch.autograd.Function):
    """``rows[order]`` for a permutation."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad[_inverse(order)], None


class _Moved(torch.autograd.Function):
    """All-to-all; backward is the opposite one."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.splits = received, sent, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(grad, *ctx.splits), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _Copies:
    """The transfers of a plan, as one rank sees them."""

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup) -> None:
        self._group = group
        share = len(plan.loads) // plan.ranks
        self.lent = [(m.expert % share, m.helper) for m in plan.transfers if m.native == rank]
        self.borrowed = [m.native for m in plan.transfers if m.helper == rank]
        self._works: list[dist.Work] = []

    def start(
        self,
        outgoing: Sequence[tuple[torch.Tensor, int]],
        incoming: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        """Post sends to and receives from ranks of the group."""
        pairs = [(dist.isend, *each) for each in outgoing]
        pairs += [(dist.irecv, *each) for each in incoming]
        operations = [
            dist.P2POp(kind, tensor, dist.get_global_rank(self._group, peer), self._group)
            for kind, tensor, peer in pairs
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class _Migrated(torch.autograd.Function):
    """Weights (own, ...) -> those of foreign experts (borrowed, ...), and the anchor: a zero that
    makes every rank enter this backward. They are there once ``copies`` were waited for."""

    @staticmethod
    def forward(ctx: Any, copies: _Copies, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.copies, ctx.like = copies, [weight.shape for weight in weights]
        foreign = [w.new_empty(len(copies.borrowed), *w.shape[1:]) for w in weights]
        copies.start(
            [(weight[slot], helper) for weight in weights for slot, helper in copies.lent],
            [
                (into, native)
                for each in foreign
                for into, native in zip(each, copies.borrowed, strict=True)
            ],
        )
        return *foreign, weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        copies, foreign = ctx.copies, [grad.contiguous() for grad in grads[:-1]]
        arriving = [
            [grad.new_empty(shape[1:]) for _ in copies.lent]
            for grad, shape in zip(foreign, ctx.like, strict=True)
        ]
        copies.start(
            [
                (gradient, native)
                for each in foreign
                for gradient, native in zip(each, copies.borrowed, strict=True)
            ],
            [
                (into, helper)
                for each in arriving
                for into, (_, helper) in zip(each, copies.lent, strict=True)
            ],
        )
        copies.wait()
        if not copies.lent:
            return (None,) * (1 + len(foreign))
        totals = [g.new_zeros(shape) for g, shape in zip(foreign, ctx.like, strict=True)]
        for total, parts in zip(totals, arriving, strict=True):
            for part, (slot, _) in zip(parts, copies.lent, strict=True):
                total[slot] += part
        return None, *totals
