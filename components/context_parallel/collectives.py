"""Rows between the ranks of a group, differentiable, with every byte counted.

Ranks may hold different numbers of rows; in a gather and in a sum over ranks each then sends as
many as the one with the most. Sums of gradients are taken in full precision and rounded once. All
ranks make the same calls in the same order, in backward too: what a rank receives must be part of
its graph even where it holds nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from components.context_parallel.order import Order
from components.vocabulary.collectives import start_gather, start_sum
from kernels.precision import accumulation_dtype

Direction = Literal["forward", "backward"]


@dataclass
class Traffic:
    """Bytes that this rank has sent to others, by name and direction.

    A gather of n bytes sends n to each of the others, whatever path the backend takes.
    """

    sent: Counter[tuple[str, Direction]] = field(default_factory=Counter)

    def add(self, name: str, direction: Direction, count: int) -> None:
        """Count ``count`` bytes."""
        self.sent[name, direction] += count

    def total(self, direction: Direction | None = None) -> int:
        """Bytes under all names, of one direction or both."""
        return sum(n for (_, d), n in self.sent.items() if direction in (None, d))

    def reset(self) -> None:
        """Begin anew."""
        self.sent.clear()


@dataclass(frozen=True)
class Link:
    """The ranks that share a batch, and what they have sent."""

    group: dist.ProcessGroup
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def rank(self) -> int:
        """This rank, within the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)


def collect(
    mine: torch.Tensor, order: Order, link: Link, name: str, direction: Direction = "forward"
) -> torch.Tensor:
    """Every rank's rows, in the order of the batch. Not differentiable.

    Args:
        mine: (rows of this rank, ...).
        order: whose rows they are.

    Returns:
        (all rows, ...) in the dtype of ``mine``.
    """
    if len(mine) < order.most:
        # Nobody reads the rows beyond, so they may hold anything.
        longer = mine.new_empty(order.most, *mine.shape[1:])
        longer[: len(mine)] = mine
        mine = longer
    parts = mine.new_empty(link.size, *mine.shape)
    start_gather(parts, mine.contiguous(), link.group).wait()
    link.traffic.add(name, direction, (link.size - 1) * mine.nbytes)
    padded = parts.flatten(0, 1)
    if order.in_order and order.even:
        return padded
    return padded[order.padded_of_batch(mine.device)]


def sum_shares(
    rows: torch.Tensor, order: Order, link: Link, name: str, direction: Direction = "backward"
) -> torch.Tensor:
    """This rank's rows of the sum of what all ranks have for the batch. Not differentiable.

    Args:
        rows: (all rows, ...), in the order of the batch and in the dtype to sum in.

    Returns:
        (rows of this rank, ...) in the same dtype.
    """
    parts = rows.contiguous()
    if not (order.in_order and order.even):
        parts = rows.new_zeros(link.size * order.most, *rows.shape[1:])
        parts[order.padded_of_batch(rows.device)] = rows
    mine = rows.new_empty(order.most, *rows.shape[1:])
    start_sum(mine, parts, link.group).wait()
    link.traffic.add(name, direction, (link.size - 1) * mine.nbytes)
    return mine[: order.sizes[link.rank]]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, order: Order, link: Link, name: str) -> torch.Tensor:
        ctx.order, ctx.link, ctx.name, ctx.dtype = order, link, name, mine.dtype
        return collect(mine, order, link, name)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wide = grad.to(accumulation_dtype(ctx.dtype))
        mine = sum_shares(wide, ctx.order, ctx.link, ctx.name)
        return mine.to(ctx.dtype), None, None, None


def gather_rows(mine: torch.Tensor, order: Order, link: Link, name: str) -> torch.Tensor:
    """``collect``, differentiable: gradients of a row are summed over the ranks, in float32 (in
    float64 for float64), and rounded once."""
    return _Gather.apply(mine, order, link, name)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        link: Link,
        name: str,
    ) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.link, ctx.name = send, receive, link, name
        return _all_to_all(rows, send, receive, link, name, "forward")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = _all_to_all(grad, ctx.receive, ctx.send, ctx.link, ctx.name, "backward")
        return back, None, None, None, None


def _all_to_all(
    rows: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    link: Link,
    name: str,
    direction: Direction,
) -> torch.Tensor:
    width = math.prod(rows.shape[1:])
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(
        out.view(-1),
        rows.contiguous().view(-1),
        [count * width for count in receive],
        [count * width for count in send],
        group=link.group,
    )
    away = sum(send) - send[link.rank]
    link.traffic.add(name, direction, away * width * rows.element_size())
    return out


def exchange_rows(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], link: Link, name: str
) -> torch.Tensor:
    """Send each rank some rows; differentiable. To neighbours alone: with zeros for the others.

    Args:
        rows: (sum of ``send``, ...), those for rank 0 first.
        send: rows for each rank.
        receive: rows from each rank.

    Returns:
        (sum of ``receive``, ...), those of rank 0 first.
    """
    return _Exchange.apply(rows, tuple(send), tuple(receive), link, name)


def send_rows(
    rows: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    link: Link,
    name: str,
    direction: Direction,
) -> torch.Tensor:
    """``exchange_rows``, not differentiable, for passes that do their own backward."""
    return _all_to_all(rows, send, receive, link, name, direction)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows[index]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def to_batch_order(packed: torch.Tensor, order: Order) -> torch.Tensor:
    """Rows of all ranks, one rank after the other, in the order of the batch; differentiable."""
    if order.in_order:
        return packed
    device = packed.device
    return _Reorder.apply(packed, order.packed_of_batch(device), order.batch_of_packed(device))


def to_packed_order(batch: torch.Tensor, order: Order) -> torch.Tensor:
    """The inverse of ``to_batch_order``; differentiable."""
    if order.in_order:
        return batch
    device = batch.device
    return _Reorder.apply(batch, order.batch_of_packed(device), order.packed_of_batch(device))
