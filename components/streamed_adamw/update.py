"""One update of AdamW, by torch's fused kernel, on views of whatever memory the values are in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from components.streamed_adamw.layout import Bucket, Piece


@dataclass(frozen=True)
class Rates:
    """Settings of a parameter group, as they are in this step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Target:
    """What the update of a parameter needs in this step.

    Attributes:
        gradient: (n,) on the device, any floating-point dtype.
        weight: (n,) on the device, the working weight, any floating-point dtype.
        step: number of this update of the parameter, from 1.
        rates: of its group.
    """

    gradient: torch.Tensor
    weight: torch.Tensor
    step: int
    rates: Rates

    def gradient_of(self, piece: Piece) -> torch.Tensor:
        """Its part of the gradient."""
        return self.gradient[piece.first : piece.first + piece.count]

    def weight_of(self, piece: Piece) -> torch.Tensor:
        """Its part of the working weight."""
        return self.weight[piece.first : piece.first + piece.count]


class Scratch(Target):
    """Memory that stands for any piece that is no longer than it."""

    def gradient_of(self, piece: Piece) -> torch.Tensor:
        """The first values."""
        return self.gradient[: piece.count]

    def weight_of(self, piece: Piece) -> torch.Tensor:
        """The first values."""
        return self.weight[: piece.count]


@dataclass(frozen=True)
class Part:
    """A piece about to be updated; all (count,), fp32 and on one device."""

    target: Target
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor


def part_of(
    bucket: Bucket, piece: Piece, target: Target, rows: torch.Tensor, gradient: torch.Tensor
) -> Part:
    """A piece whose bucket lies in ``rows``.

    Args:
        bucket: what ``rows`` begins with.
        piece: one of the bucket's.
        target: of its parameter.
        rows: fp32 (3 or more, bucket.size or more): master, exp_avg, exp_avg_sq.
        gradient: fp32 (count,).
    """
    place = within(bucket, piece)
    return Part(target, rows[0, place], rows[1, place], rows[2, place], gradient)


def within(bucket: Bucket, piece: Piece) -> slice:
    """Where a piece is, counted from its bucket's begin."""
    begin = piece.offset - bucket.start
    return slice(begin, begin + piece.count)


def update(parts: Sequence[Part]) -> None:
    """Update masters and moments in place, in the lane in use."""
    together: dict[tuple[Rates, int], list[Part]] = {}
    for part in parts:
        together.setdefault((part.target.rates, part.target.step), []).append(part)
    for (rates, step), group in together.items():
        # Torch counts up before it updates, each of these for itself.
        before = torch.full((len(group),), step - 1.0, device=group[0].master.device)
        adamw(
            [part.master for part in group],
            [part.gradient for part in group],
            [part.exp_avg for part in group],
            [part.exp_avg_sq for part in group],
            [],
            list(before.unbind()),
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=rates.beta1,
            beta2=rates.beta2,
            lr=rates.lr,
            weight_decay=rates.weight_decay,
            eps=rates.eps,
        )
