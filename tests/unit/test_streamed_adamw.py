"""The streamed AdamW computes what torch's does, whichever way its values go."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from components.streamed_adamw import engine
from components.streamed_adamw.engine import staging_bytes
from components.streamed_adamw.lanes import Lanes
from components.streamed_adamw.layout import lay_out
from components.streamed_adamw.optimizer import OffloadStreamAdamW
from tests.unit.streamed_support import (
    SHAPES,
    SIZE,
    Ram,
    assert_same,
    draw,
    give,
    make_parameters,
    narrow,
    plain,
    streamed,
    train,
)


@pytest.mark.parametrize("bucket", [64, 1000, 10**8])
@pytest.mark.parametrize("split", [0, 0.3, 0.5, 1, "auto"])
def test_twenty_steps_are_torchs_to_the_bit(split: Any, bucket: int) -> None:
    """Groups, a schedule, missing gradients, cut parameters; fp32 working weights."""
    expected, mine = make_parameters(), make_parameters()
    reference = plain(expected)
    train(expected, reference)
    with streamed(mine, split=split, bucket_parameters=bucket) as optimizer:
        train(mine, optimizer)
        assert_same(optimizer, mine, reference, expected)


def test_a_split_is_measured_on_a_sample_that_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "SAMPLE", 9000)
    mine = make_parameters()
    with streamed(mine, split="auto", bucket_parameters=700) as optimizer:
        assert optimizer.measured is not None and 8900 < optimizer.measured.parameters <= 9000
        assert optimizer.share == pytest.approx(optimizer.measured.share, abs=64 / SIZE)
        assert optimizer.report is None
        for parameter, before in zip(mine, make_parameters(), strict=True):
            assert torch.equal(parameter, before)
            assert torch.equal(optimizer.masters[parameter], before)
            assert all(not bool(tensor.any()) for tensor in optimizer.state[parameter].values())


@pytest.mark.parametrize("split", [0, 0.5, 1])
def test_narrow_working_weights_are_the_masters_rounded(split: float) -> None:
    expected, mine = make_parameters(), make_parameters()
    reference = plain(expected)
    train(expected, reference)
    with streamed(mine, split=split, bucket_parameters=700, threads=2) as optimizer:
        narrow(mine)
        train(mine, optimizer)
        assert_same(optimizer, mine, reference, expected)
        assert {parameter.dtype for parameter in mine} == {torch.bfloat16}


def test_both_ways_are_used_at_a_split() -> None:
    mine = make_parameters()
    with streamed(mine, split=0.5, bucket_parameters=700) as optimizer:
        train(mine, optimizer, range(1, 2))
        assert optimizer.report is not None
        assert optimizer.report.streamed + optimizer.report.processed == SIZE
        assert optimizer.report.processed == round(optimizer.share * SIZE)
        assert optimizer.share == pytest.approx(0.5, abs=64 / SIZE)


@pytest.mark.parametrize("split", [0, 1, 0.4])
def test_narrow_gradients_are_widened_first(split: float) -> None:
    expected, mine = make_parameters(), make_parameters()
    reference = plain(expected)
    with streamed(mine, split=split, bucket_parameters=700) as optimizer:
        narrow(mine)
        for step in range(5):
            rounded = [None if g is None else g.bfloat16() for g in draw(mine, step)]
            for parameter in mine:
                parameter.grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
            give(mine, rounded)
            give(expected, [None if g is None else g.float() for g in rounded])
            optimizer.step()
            reference.step()
        assert_same(optimizer, mine, reference, expected)


def test_gradients_of_any_strides_are_taken() -> None:
    expected, mine = make_parameters(), make_parameters()
    reference = plain(expected)
    with streamed(mine, split=0.5) as optimizer:
        give(expected, draw(mine, 1))
        give(mine, draw(mine, 1))
        assert mine[1].grad is not None
        mine[1].grad = mine[1].grad.t().contiguous().t()
        optimizer.step()
        reference.step()
        assert_same(optimizer, mine, reference, expected)


def test_a_learning_rate_may_be_a_tensor() -> None:
    expected, mine = make_parameters(), make_parameters()
    reference = torch.optim.AdamW(expected, fused=True, lr=torch.tensor(0.0123))
    optimizer = OffloadStreamAdamW(mine, lr=torch.tensor(0.0123), host=Ram, split=0)
    for step in range(3):
        for parameters, each in ((expected, reference), (mine, optimizer)):
            give(parameters, draw(parameters, step))
            each.param_groups[0]["lr"].mul_(0.5)
            each.step()
    assert_same(optimizer, mine, reference, expected)


def test_gradients_accumulate_in_the_parameters() -> None:
    expected, mine = make_parameters(), make_parameters()
    reference = plain(expected)
    with streamed(mine, split=0.5) as optimizer:
        for parameters, each in ((expected, reference), (mine, optimizer)):
            for step in range(1, 5):
                loss = sum((p * g).sum() for p, g in zip(parameters, draw(mine, 1), strict=True))
                loss.backward()  # type: ignore[union-attr]
                if step % 2 == 0:
                    each.step()
                    each.zero_grad()
        assert_same(optimizer, mine, reference, expected)
        assert all(parameter.grad is None for parameter in mine)


def test_frozen_parameters_have_no_state_and_stay() -> None:
    mine = make_parameters()
    mine[5].requires_grad_(False)
    before = mine[5].detach().clone()
    asked: list[int] = []

    def host(nbytes: int) -> Ram:
        asked.append(nbytes)
        return Ram(nbytes)

    with streamed(mine, host=host, split=0) as optimizer:
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.refresh_weights()
        assert asked == [optimizer.host_bytes] == [12 * (SIZE - 5000)]
        assert mine[5] not in optimizer.masters and mine[5] not in optimizer.state
    assert torch.equal(mine[5], before)


@pytest.mark.parametrize("split", [0, 0.5, "auto"])
def test_a_rank_may_hold_no_values_at_all(split: Any) -> None:
    mine = [nn.Parameter(torch.ones(0, 3))]
    optimizer = OffloadStreamAdamW(mine, host=Ram, split=split)
    mine[0].grad = torch.ones(0, 3)
    optimizer.step()
    optimizer.refresh_weights()
    assert optimizer.host_bytes == 1 and optimizer.share == 0
    assert optimizer.state[mine[0]]["step"] == 1
    optimizer.close()


def test_a_step_without_gradients_moves_nothing() -> None:
    mine = make_parameters()
    with streamed(mine, split=0.5) as optimizer:
        optimizer.step()
        assert optimizer.report is not None
        assert (optimizer.report.streamed, optimizer.report.processed) == (0, 0)
        assert optimizer.report.staging_bytes == 0
        assert all(torch.equal(a, b) for a, b in zip(mine, make_parameters(), strict=True))


def test_buckets_without_gradients_are_left_out() -> None:
    mine = make_parameters()
    with streamed(mine, split=0, bucket_parameters=1000) as optimizer:
        mine[0].grad = torch.ones_like(mine[0])
        optimizer.step()
        assert optimizer.report is not None and optimizer.report.streamed == 40


class Counting(Lanes):
    """Adds up the memory of a step."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.nbytes = 0

    def staging(self, *shape: int) -> torch.Tensor:
        memory = super().staging(*shape)
        self.nbytes += memory.nbytes
        return memory


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_staging_is_slots_times_the_largest_bucket(slots: int, wide: bool) -> None:
    """Buckets of 1,000: the largest is the parameter of 1,000, or 5,000 in equal parts."""
    lanes, mine = Counting(), make_parameters()
    with streamed(mine, split=0, slots=slots, bucket_parameters=1000, lanes=lanes) as optimizer:
        for parameter in mine:
            if wide:
                parameter.grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
            parameter.grad = torch.ones_like(
                parameter, dtype=torch.bfloat16 if wide else torch.float32
            )
        optimizer.step()
        assert optimizer.report is not None
        exact = slots * 1000 * (16 if wide else 12)
        assert lanes.nbytes == optimizer.report.staging_bytes == exact
        counts = lay_out([parameter.numel() for parameter in mine])
        assert staging_bytes(counts, 1000, slots, 0, wide) == exact


def test_the_cpus_way_takes_a_tile_on_the_device_and_two_on_the_host() -> None:
    lanes, mine = Counting(), make_parameters()
    with streamed(mine, split=1, bucket_parameters=1000, lanes=lanes) as optimizer:
        train(mine, optimizer, range(1, 2))
        assert optimizer.report is not None
        assert lanes.nbytes == optimizer.report.staging_bytes == 1000 * 4
        assert optimizer.host_bytes == 12 * SIZE + 2 * 4 * 1000
        counts = lay_out([parameter.numel() for parameter in mine])
        assert staging_bytes(counts, 1000, 2, 1) == 4000


@pytest.mark.parametrize("split", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("wide", [False, True])
def test_what_a_cut_leaves_of_a_parameter_may_be_the_largest_bucket(split: Any, wide: bool) -> None:
    """1,500 values go in buckets of 768 and 732; 1,000 of them go in one."""
    lanes, mine = Counting(), [nn.Parameter(torch.ones(1500))]
    optimizer = OffloadStreamAdamW(
        mine, host=Ram, split=split, bucket_parameters=1000, slots=3, lanes=lanes
    )
    if wide:
        mine[0].grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
    mine[0].grad = torch.ones(1500, dtype=torch.bfloat16 if wide else torch.float32)
    lanes.nbytes = 0
    optimizer.step()
    planned = staging_bytes(lay_out([1500]), 1000, 3, split, wide)
    assert optimizer.report is not None
    assert lanes.nbytes == optimizer.report.staging_bytes == planned
    optimizer.close()


def test_fewer_buckets_take_fewer_slots() -> None:
    lanes, mine = Counting(), make_parameters()
    with streamed(mine, split=0, slots=5, lanes=lanes) as optimizer:
        train(mine, optimizer, range(1, 2))
        assert lanes.nbytes == 12 * SIZE


def test_state_is_in_the_host_memory_and_nowhere_else() -> None:
    mine = make_parameters()
    slabs: list[Ram] = []

    def host(nbytes: int) -> Ram:
        slabs.append(Ram(nbytes))
        return slabs[-1]

    with streamed(mine, host=host, split=0) as optimizer:
        begin = slabs[0].bytes.data_ptr()
        places = set()
        for parameter in mine:
            state = optimizer.state[parameter]
            for tensor in (optimizer.masters[parameter], state["exp_avg"], state["exp_avg_sq"]):
                assert tensor.shape == parameter.shape and tensor.dtype == torch.float32
                if tensor.numel():
                    places.add(tensor.data_ptr() - begin)
                    assert 0 <= tensor.data_ptr() - begin < 12 * SIZE
        assert len(places) == 3 * (len(SHAPES) - 1)
        assert len(slabs) == 1


def test_weights_and_masters_are_read_and_refreshed() -> None:
    mine = make_parameters()
    with streamed(mine, split=0.5, bucket_parameters=64) as optimizer:
        narrow(mine)
        for master in optimizer.masters.values():
            master.fill_(1 + 2**-12)
        optimizer.refresh_weights()
        assert all(bool((parameter == 1).all()) for parameter in mine)
        optimizer.read_weights()
        assert all(bool((master == 1).all()) for master in optimizer.masters.values())


def test_a_closure_is_called_with_gradients_enabled() -> None:
    mine = make_parameters()
    with streamed(mine, split=0) as optimizer:

        def closure() -> float:
            loss = mine[0].square().sum()
            loss.backward()
            return loss.item()

        assert optimizer.step(closure) > 0
        assert optimizer.state[mine[0]]["step"] == 1


def test_the_cpus_threads_are_its_own() -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    with streamed(make_parameters(), split=1, threads=before + 2):
        assert torch.get_num_threads() == before
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
    assert seen == [before]


def test_schedulers_and_hooks_find_an_optimizer() -> None:
    mine, calls = make_parameters(), []
    with streamed(mine, split=0) as optimizer:
        optimizer.register_step_pre_hook(lambda *unused: calls.append("before"))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        give(mine, draw(mine, 1))
        optimizer.step()
        schedule.step()
        assert calls == ["before"]
        assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 1.5e-3]
