"""Parameters of all shapes, updated by torch's AdamW and by ours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from components.streamed_adamw.optimizer import OffloadStreamAdamW

SHAPES = ((37,), (129, 65), (0, 4), (1000,), (3,), (5000,), (2, 1, 7))
SIZE = sum(-(-torch.Size(shape).numel() // 4) * 4 for shape in SHAPES)
"""Values, every parameter rounded up to four."""

Gradients = Sequence[torch.Tensor | None]


class Ram:
    """Host memory that is NaN all over at first."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        return self.bytes[start : start + nbytes]


def make_parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes]


def groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups that differ in every option."""
    return [
        {"params": list(parameters[:3])},
        {
            "params": list(parameters[3:]), "weight_decay": 0.0, "lr": 3e-3,
            "betas": (0.8, 0.99), "eps": 1e-6,
        },
    ]  # fmt: skip


OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


@contextmanager
def streamed(
    parameters: Sequence[nn.Parameter], host: Callable[[int], Any] = Ram, **plan: Any
) -> Iterator[OffloadStreamAdamW]:
    optimizer = OffloadStreamAdamW(groups(parameters), host=host, **{**OPTIONS, **plan})
    try:
        yield optimizer
    finally:
        optimizer.close()


def plain(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(parameters), fused=True, **OPTIONS)


def narrow(parameters: Sequence[nn.Parameter]) -> None:
    """Make working weights of them."""
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
        parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]


def draw(parameters: Sequence[nn.Parameter], step: int) -> Gradients:
    """Gradients of a step; one parameter has none in every third."""
    random = torch.Generator().manual_seed(100 + step)
    drawn = [torch.randn(parameter.shape, generator=random) for parameter in parameters]
    return [None if i == 3 and step % 3 == 0 else gradient for i, gradient in enumerate(drawn)]


def give(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


def train(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range = range(20)
) -> None:
    """Steps whose learning rates are a schedule's."""
    for step in steps:
        for group, base in zip(optimizer.param_groups, (1e-2, 3e-3), strict=True):
            group["lr"] = base / (1 + step)
        give(parameters, draw(parameters, step))
        optimizer.step()


def assert_same(
    ours: OffloadStreamAdamW,
    parameters: Sequence[nn.Parameter],
    theirs: torch.optim.AdamW,
    expected: Sequence[nn.Parameter],
) -> None:
    """To the bit: masters, moments, steps, and working weights as the masters' roundings."""
    for i, (mine, wanted) in enumerate(zip(parameters, expected, strict=True)):
        assert torch.equal(ours.masters[mine], wanted), i
        assert torch.equal(mine, wanted.to(mine.dtype)), i
        for key, value in theirs.state[wanted].items():
            assert torch.equal(ours.state[mine][key], value), (i, key)
