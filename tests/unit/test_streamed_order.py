"""Copies and updates that may be as late as they like change no bit; one wait less and they do."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from components.streamed_adamw.optimizer import OffloadStreamAdamW
from tests.unit.late_lanes import Careless, LateDevice
from tests.unit.streamed_support import (
    assert_same,
    draw,
    make_parameters,
    narrow,
    plain,
    streamed,
    train,
)

STEPS = range(1, 3)


def train_late(
    device: LateDevice, parameters: Sequence[nn.Parameter], optimizer: OffloadStreamAdamW
) -> list[list[torch.Tensor]]:
    """Steps whose gradients come late, and whose weights somebody still reads; what he read."""
    seen = []
    for step in STEPS:
        for group, base in zip(optimizer.param_groups, (1e-2, 3e-3), strict=True):
            group["lr"] = base / (1 + step)
        seen.append([torch.zeros_like(parameter) for parameter in parameters])
        for parameter, read, gradient in zip(
            parameters, seen[-1], draw(parameters, step), strict=True
        ):
            parameter.grad = None
            if gradient is not None:
                parameter.grad = torch.full_like(gradient, float("nan"))
                with device.main.use(), torch.no_grad():
                    parameter.grad.copy_(gradient)
            with device.main.use(), torch.no_grad():
                read.copy_(parameter.detach())
        optimizer.step()
    return seen


def check(device: LateDevice, split: float, slots: int) -> None:
    """
    Raises:
        AssertionError: some value is not torch's.
    """
    expected, mine = make_parameters(), make_parameters()
    reference = plain(expected)
    before = []
    for step in STEPS:
        before.append([parameter.detach().bfloat16() for parameter in expected])
        train(expected, reference, range(step, step + 1))
    with streamed(mine, split=split, slots=slots, bucket_parameters=640, lanes=device) as optimizer:
        narrow(mine)
        seen = train_late(device, mine, optimizer)
        assert_same(optimizer, mine, reference, expected)
        for read, wanted in zip(seen, before, strict=True):
            assert all(map(torch.equal, read, wanted))


@pytest.mark.parametrize("split", [0, 0.5, 1])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_lanes_may_be_as_late_as_they_like(slots: int, split: float) -> None:
    for seed in range(4):
        check(LateDevice(seed), split, slots)


@pytest.mark.parametrize(
    ("number", "split"),
    [(0, 0), (1, 0), (2, 0), (3, 1)],
    ids=["computing", "up", "down", "gradients down"],
)
def test_a_lane_that_does_not_wait_is_noticed(number: int, split: float) -> None:
    """What keeps the test above from passing whatever is done."""

    def wrong(seed: int) -> bool:
        try:
            check(Careless(seed, number), split, 2)
        except AssertionError:
            return True
        return False

    assert any(wrong(seed) for seed in range(10))


def test_weights_are_refreshed_behind_what_reads_them() -> None:
    device, mine = LateDevice(0), make_parameters()
    with streamed(mine, split=0.5, bucket_parameters=640, lanes=device) as optimizer:
        for master in optimizer.masters.values():
            master.fill_(2)
        read = torch.zeros_like(mine[1])
        with device.main.use(), torch.no_grad():
            read.copy_(mine[1].detach())
        optimizer.refresh_weights()
        assert torch.equal(read, make_parameters()[1])
        assert all(bool((parameter == 2).all()) for parameter in mine)
