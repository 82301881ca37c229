"""What the streamed AdamW refuses, what it does when something fails, and how state is loaded."""

import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from components.streamed_adamw import processor, streaming
from components.streamed_adamw.host import HostState
from components.streamed_adamw.layout import lay_out
from components.streamed_adamw.optimizer import OffloadStreamAdamW
from tests.unit.late_lanes import LateDevice
from tests.unit.streamed_support import (
    Ram,
    assert_same,
    draw,
    give,
    groups,
    make_parameters,
    narrow,
    plain,
    streamed,
    train,
)


def never(nbytes: int) -> Ram:
    raise AssertionError("host memory was taken before the arguments were checked")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_parameters": 63}, "bucket_parameters is 63; it must be at least 64"),
        ({"slots": 0}, "slots is 0; it must be at least 1"),
        ({"split": 1.5}, 'split is 1.5; it must be "auto" or a number from 0 to 1'),
        ({"split": "half"}, "split is 'half'; it must be \"auto\""),
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"lr": -1.0}, "lr is -1.0; it must be zero or more"),
        ({"eps": float("nan")}, "eps is nan; it must be zero or more"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\); both"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadStreamAdamW(make_parameters(), host=never, **options)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"amsgrad": True}, "amsgrad is True; a streamed AdamW knows False alone"),
        ({"maximize": True}, "maximize is True"),
        ({"fused": False}, "fused is False; a streamed AdamW knows True alone"),
        ({"foreach": True}, "foreach is True"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; it must be zero or more"),
    ],
)
def test_options_of_a_group_are_checked(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadStreamAdamW([{"params": make_parameters(), **option}], host=never)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (nn.Parameter(torch.ones(4, 4).bfloat16()), "odd is torch.bfloat16"),
        (nn.Parameter(torch.ones(4, 2).t()), r"odd has strides \(1, 2\); it must be contiguous"),
        (nn.Parameter(torch.ones(4, device="meta")), "odd is on meta; all parameters must be on"),
    ],
)
def test_parameters_that_have_no_master_are_refused(parameter: Any, message: str) -> None:
    group = {"params": [make_parameters()[0], parameter], "param_names": ["even", "odd"]}
    with pytest.raises(ValueError, match=message):
        OffloadStreamAdamW([group], host=never)


def test_groups_come_when_it_is_made() -> None:
    with (
        streamed(make_parameters(), split=0) as optimizer,
        pytest.raises(ValueError, match="all its parameter groups when it is made"),
    ):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (torch.ones(37).to_sparse(), "the gradient of group 0 parameter 0 is torch.sparse_coo"),
        (torch.ones(37, 1), r"the gradient of group 0 parameter 0 is \(\(37, 1\),\)"),
    ],
)
def test_odd_gradients_are_refused_and_nothing_changes(gradient: Any, message: str) -> None:
    mine = make_parameters()
    with streamed(mine, split=0.5) as optimizer:
        give(mine, draw(mine, 1))
        # Torch checks the shape when a gradient is set, not later.
        kept = mine[0].data
        if gradient.layout == torch.strided:
            mine[0].data = gradient
        mine[0].grad = gradient
        mine[0].data = kept
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        for parameter, before in zip(mine, make_parameters(), strict=True):
            assert torch.equal(optimizer.masters[parameter], before)
            assert optimizer.state[parameter]["step"] == 0


def test_the_cpus_thread_is_at_home_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would go to the first device whenever it leaves a stream."""
    seen: list[tuple[torch.device, str]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: seen.append((device, threading.current_thread().name)),
    )
    device, state = LateDevice(0), HostState(Ram(80), lay_out([1]), 4)
    processor.Processor(device, state, 1).close()
    assert seen == []
    device.device = torch.device("cuda:3")
    processor.Processor(device, state, 1).close()
    ((where, thread),) = seen
    assert where == device.device and thread.startswith("streamed_adamw")


class Broken(ZeroDivisionError):
    """Something that went wrong."""


@pytest.mark.parametrize("slow", [1, 2, 3, 4])
@pytest.mark.parametrize("way", [processor, streaming], ids=["CPU", "device"])
def test_an_error_of_either_way_is_raised_when_nothing_is_under_way(
    way: Any, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, mine = LateDevice(slow), make_parameters()
    with streamed(mine, split=0.5, bucket_parameters=640, lanes=device) as optimizer:
        device.speeds[slow] = 1e-9
        update, calls = way.update, []

        def fail(parts: Any) -> None:
            calls.append(len(parts))
            if len(calls) == 3:
                raise Broken("third")
            update(parts)

        monkeypatch.setattr(way, "update", fail)
        give(mine, draw(mine, 1))
        with pytest.raises(Broken, match="third"):
            optimizer.step()
        # Everything but the computation itself, which the caller waits for in the usual way.
        for lane in device.lanes[1:]:
            assert lane.done == len(lane.queue)
        assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}


def test_after_an_error_the_optimizer_can_be_loaded_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, mine = make_parameters(), make_parameters()
    reference = plain(expected)
    train(expected, reference, range(3))
    with streamed(mine, split=1) as optimizer:
        with monkeypatch.context() as patch:
            patch.setattr(processor, "update", lambda parts: 1 / 0)
            give(mine, draw(mine, 1))
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
        load(optimizer, mine, reference, expected)
        train(expected, reference, range(3, 6))
        train(mine, optimizer, range(3, 6))
        assert_same(optimizer, mine, reference, expected)


def load(
    optimizer: OffloadStreamAdamW, mine: Any, reference: torch.optim.AdamW, expected: Any
) -> None:
    """What a checkpoint of ``reference`` holds, read into the memory that is there."""
    optimizer.load_state_dict(reference.state_dict())
    for parameter, wanted in zip(mine, expected, strict=True):
        optimizer.masters[parameter].copy_(wanted.detach())
    optimizer.refresh_weights()


@pytest.mark.parametrize("split", [0, 0.5])
def test_a_plain_adamws_state_loads_in_place_and_goes_on_to_the_bit(split: float) -> None:
    expected, mine = make_parameters(), make_parameters()
    reference = plain(expected)
    train(expected, reference, range(4))
    with streamed(mine, split=split) as optimizer:
        narrow(mine)
        places = [optimizer.state[p][key].data_ptr() for p in mine for key in optimizer.state[p]]
        load(optimizer, mine, reference, expected)
        assert [group["lr"] for group in optimizer.param_groups] == [
            group["lr"] for group in reference.param_groups
        ]
        assert places == [
            optimizer.state[p][key].data_ptr() for p in mine for key in optimizer.state[p]
        ]
        assert_same(optimizer, mine, reference, expected)
        train(expected, reference, range(4, 8))
        train(mine, optimizer, range(4, 8))
        assert_same(optimizer, mine, reference, expected)


def test_a_plain_adamw_loads_our_state_and_goes_on_to_the_bit() -> None:
    first, second = make_parameters(), make_parameters()
    with streamed(first, split=0.5) as optimizer:
        train(first, optimizer, range(4))
        other = plain(second)
        # Torch's does not copy what is on the right device.
        other.load_state_dict(deepcopy(optimizer.state_dict()))
        for parameter, wanted in zip(second, first, strict=True):
            parameter.data.copy_(wanted.detach())
        train(first, optimizer, range(4, 8))
        train(second, other, range(4, 8))
        assert_same(optimizer, first, other, second)
        ours, theirs = (sorted(each.param_groups[0]) for each in (optimizer, other))
        assert ours == theirs


def test_parameters_without_saved_state_begin_anew() -> None:
    mine = make_parameters()
    fresh = plain(make_parameters())
    with streamed(mine, split=0) as optimizer:
        train(mine, optimizer, range(1, 4))
        optimizer.load_state_dict(fresh.state_dict())
        for state in optimizer.state.values():
            assert all(not bool(tensor.any()) for tensor in state.values())


def test_state_of_other_parameters_is_refused() -> None:
    mine, other = make_parameters(), make_parameters()
    other[1] = nn.Parameter(torch.ones(65, 129))
    saved = plain(other)
    train(other, saved, range(1, 2))
    with streamed(mine, split=0) as optimizer:
        with pytest.raises(ValueError, match=r"saved exp_avg of group 0 parameter 1 is \(\(65"):
            optimizer.load_state_dict(saved.state_dict())
        few = torch.optim.AdamW(groups(mine)[:1], fused=True)
        with pytest.raises(ValueError, match=r"saved groups have \[3\] parameters, these have"):
            optimizer.load_state_dict(few.state_dict())
        amsgrad = torch.optim.AdamW(groups(other), fused=True, amsgrad=True)
        with pytest.raises(ValueError, match="amsgrad is True"):
            optimizer.load_state_dict(amsgrad.state_dict())
