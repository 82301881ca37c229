"""On a GPU: state streamed by slow copies through poisoned slots is torch's AdamW to the bit."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torchtitan.tools.utils
from torch import nn

from components.offload.slabs import Slab, cpus_near
from components.streamed_adamw import processor
from components.streamed_adamw.lanes import Lane, Lanes, Mark, StreamLane
from components.streamed_adamw.optimizer import OffloadStreamAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

SHAPES = ((1024, 1024), (64,), (300, 1001), (0, 8), (2048, 512), (7,), (512, 900))
COUNTS = [torch.Size(shape).numel() for shape in SHAPES]
SIZE = sum(-(-count // 4) * 4 for count in COUNTS)
BUCKET = 400_000
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEPS = 20
SLOW = 2_000_000
"""Clock cycles that a lane waits at most before each piece of work: about 1 ms, several times what
the copy of a bucket takes."""


class SlowLane(StreamLane):
    """Begins late, by a different delay each time."""

    @contextmanager
    def use(self) -> Iterator[None]:  # type: ignore[override]
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(random.randrange(SLOW))
            yield


class HastyLane(SlowLane):
    """Does not wait for other lanes."""

    def after(self, mark: Mark) -> None:
        """Nobody waits."""


class PoisonedLanes(Lanes):
    """Memory that is not needed any more, or not yet filled, is NaN."""

    def staging(self, *shape: int) -> torch.Tensor:
        return super().staging(*shape).fill_(float("nan"))

    def let_go(self, memory: torch.Tensor) -> None:
        memory.fill_(float("nan"))


class SlowLanes(PoisonedLanes):
    kind = SlowLane

    def side(self) -> Lane:
        return self.kind(torch.cuda.Stream(self.device))


class SlowComputation(PoisonedLanes):
    def computing(self) -> Lane:
        return SlowLane(torch.cuda.current_stream(self.device))


class HastyLanes(SlowLanes):
    kind = HastyLane


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def parameters_on(where: torch.device) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(where)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor | None]:
    """On the device; one parameter has none in every third step."""
    draw = torch.Generator(device=device()).manual_seed(100 + step)
    made = [torch.randn(shape, generator=draw, device=device()) for shape in SHAPES]
    return [None if i == 4 and step % 3 == 0 else gradient for i, gradient in enumerate(made)]


@contextmanager
def streamed(
    parameters: Sequence[nn.Parameter], lanes: Lanes | None = None, **plan: Any
) -> Iterator[OffloadStreamAdamW]:
    slabs: list[Slab] = []

    def host(nbytes: int) -> Slab:
        slabs.append(Slab(nbytes, device(), cpus_near(device())))
        return slabs[0]

    optimizer = OffloadStreamAdamW(
        parameters, host=host, lanes=lanes, threads=4, bucket_parameters=BUCKET, **plan, **OPTIONS
    )
    assert slabs[0].view(0, optimizer.host_bytes).is_pinned()
    try:
        yield optimizer
    finally:
        torch.cuda.synchronize()
        optimizer.close()
        slabs[0].close()


def narrow(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
        parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]


def train(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, late: bool = False
) -> list[torch.Tensor]:
    """Twenty steps; the weights as the next forward reads them.

    Args:
        parameters: of the optimizer, on the device or on the CPU.
        optimizer: torch's or ours.
        late: gradients and what reads the weights are still on their way when a step begins.
    """
    read = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        if late:
            torch.cuda._sleep(5 * SLOW)
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            read.append(parameter.detach().clone())
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        optimizer.step()
    return read


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors])


class Expected:
    """What torch's fused AdamW makes of fp32 parameters on one device."""

    def __init__(self, where: torch.device) -> None:
        self.parameters = parameters_on(where)
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True, **OPTIONS)
        self.read = train(self.parameters, self.optimizer)

    def state(self, key: str) -> torch.Tensor:
        return flat([self.optimizer.state[parameter][key] for parameter in self.parameters])


@pytest.fixture(scope="module")
def on_device() -> Expected:
    return Expected(device())


@pytest.fixture(scope="module")
def on_cpu() -> Expected:
    return Expected(torch.device("cpu"))


def assert_bits(
    optimizer: OffloadStreamAdamW, mine: Sequence[nn.Parameter], expected: torch.Tensor
) -> None:
    """Masters, and working weights as their roundings."""
    masters = flat(list(optimizer.masters.values()))
    assert bool(expected.isfinite().all())
    assert torch.equal(masters, expected)
    assert torch.equal(flat(mine), masters.bfloat16())


def both(optimizer: OffloadStreamAdamW, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Values of ``first`` where they stream and of ``last`` where the CPU updates them."""
    middle = round((1 - optimizer.share) * SIZE)
    # The flat space rounds every parameter up to four values.
    place, chosen, begin = 0, first.clone(), 0
    for count in COUNTS:
        streams = min(max(0, middle - place), count)
        chosen[begin + streams : begin + count] = last[begin + streams : begin + count]
        place, begin = place + -(-count // 4) * 4, begin + count
    return chosen


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("kind", [Lanes, PoisonedLanes, SlowLanes, SlowComputation])
def test_streamed_steps_are_torchs_on_the_device_to_the_bit(
    kind: type[Lanes], slots: int, on_device: Expected
) -> None:
    random.seed(1)
    mine = parameters_on(device())
    with streamed(mine, kind(device()), split=0, slots=slots) as optimizer:
        narrow(mine)
        read = train(mine, optimizer, late=kind is not Lanes)
        assert_bits(optimizer, mine, flat(on_device.parameters))
        assert torch.equal(flat(read), flat(on_device.read).bfloat16())
        for key in ("exp_avg", "exp_avg_sq", "step"):
            found = flat([optimizer.state[parameter][key] for parameter in mine])
            assert torch.equal(found, on_device.state(key)), key


@pytest.mark.parametrize("kind", [Lanes, SlowLanes, SlowComputation])
def test_steps_of_the_cpu_are_torchs_on_the_cpu_to_the_bit(
    kind: type[Lanes], on_cpu: Expected
) -> None:
    random.seed(2)
    mine = parameters_on(device())
    with streamed(mine, kind(device()), split=1) as optimizer:
        narrow(mine)
        read = train(mine, optimizer, late=True)
        assert_bits(optimizer, mine, flat(on_cpu.parameters))
        assert torch.equal(flat(read), flat(on_cpu.read).bfloat16())


@pytest.mark.parametrize("split", [0.5, "auto"])
@pytest.mark.parametrize("kind", [Lanes, SlowLanes, SlowComputation])
def test_at_a_split_every_value_is_that_of_its_way(
    kind: type[Lanes], split: Any, on_device: Expected, on_cpu: Expected
) -> None:
    random.seed(3)
    mine = parameters_on(device())
    with streamed(mine, kind(device()), split=split) as optimizer:
        narrow(mine)
        train(mine, optimizer, late=True)
        wanted = both(optimizer, flat(on_device.parameters), flat(on_cpu.parameters))
        assert_bits(optimizer, mine, wanted)
        if split == 0.5:
            assert optimizer.share == pytest.approx(0.5, abs=1e-4)
        else:
            assert optimizer.measured is not None and optimizer.measured.streaming > 0


def test_both_kernels_agree_to_the_last_places(on_device: Expected, on_cpu: Expected) -> None:
    # Averages of numbers around 1 that cancel: what is left is exact to a place of those.
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(on_device.state(key), on_cpu.state(key), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        flat(on_device.parameters), flat(on_cpu.parameters), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("split", [0, 0.5, 1])
def test_gradients_in_bfloat16_are_widened(split: float) -> None:
    random.seed(4)
    mine, wide = parameters_on(device()), parameters_on(device())
    with (
        streamed(mine, SlowLanes(device()), split=split) as optimizer,
        streamed(wide, split=split) as other,
    ):
        narrow(mine)
        for step in range(5):
            for ours, theirs, gradient in zip(mine, wide, gradients(step), strict=True):
                ours.grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
                ours.grad = None if gradient is None else gradient.bfloat16()
                theirs.grad = None if gradient is None else gradient.bfloat16().float()
            optimizer.step()
            other.step()
        assert_bits(optimizer, mine, flat(list(other.masters.values())))


@pytest.mark.parametrize("split", [0, 0.5, 1])
def test_the_stream_in_use_is_asked_for_at_every_step(
    split: float, on_device: Expected, on_cpu: Expected
) -> None:
    """Made on one stream, used on another."""
    random.seed(5)
    mine = parameters_on(device())
    with streamed(mine, SlowLanes(device()), split=split) as optimizer:
        narrow(mine)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            train(mine, optimizer, late=True)
        torch.cuda.current_stream().wait_stream(other)
        wanted = both(optimizer, flat(on_device.parameters), flat(on_cpu.parameters))
        assert_bits(optimizer, mine, wanted)


@pytest.mark.parametrize("split", [0, 1])
def test_a_wait_that_is_left_out_is_noticed(
    split: float, on_device: Expected, on_cpu: Expected
) -> None:
    """What keeps the tests above from passing whatever is done."""
    random.seed(6)
    mine = parameters_on(device())
    with streamed(mine, HastyLanes(device()), split=split) as optimizer:
        narrow(mine)
        train(mine, optimizer, late=True)
        wanted = both(optimizer, flat(on_device.parameters), flat(on_cpu.parameters))
        assert not torch.equal(flat(list(optimizer.masters.values())), wanted)


@pytest.mark.parametrize("split", [0, 0.5, 1])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_step_takes_its_staging_memory_and_gives_it_back(slots: int, split: float) -> None:
    mine = parameters_on(device())
    with streamed(mine, split=split, slots=slots) as optimizer:
        narrow(mine)
        for parameter, gradient in zip(mine, gradients(1), strict=True):
            parameter.grad = gradient
        del gradient
        optimizer.step()
        torch.cuda.synchronize()
        # As asked for: the allocator does not always split a block, and then counts all of it.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        taken = after["requested_bytes.all.peak"] - before
        assert after["requested_bytes.all.current"] == before
        assert optimizer.report is not None
        staging = optimizer.report.staging_bytes
        if split == 0:
            # Equal parts of the parameters of 1,024 x 1,024 values.
            assert staging == slots * 12 * 349_568
        if split == 1:
            assert staging == 4 * 349_568
        # The counts of steps, one block of 512 bytes per bucket.
        assert staging <= taken <= staging + 2**14


def test_pinned_memory_is_twelve_bytes_a_parameter() -> None:
    before = torch.cuda.memory.host_memory_stats().get("allocated_bytes.current", 0)
    mine = [nn.Parameter(torch.zeros(20_000_019, device=device()))]
    slabs: list[Slab] = []

    def host(nbytes: int) -> Slab:
        slabs.append(Slab(nbytes, device(), cpus_near(device())))
        return slabs[0]

    optimizer = OffloadStreamAdamW(mine, host=host, split="auto", bucket_parameters=10**6)
    exact = 12 * 20_000_019
    assert exact <= slabs[0].pinned <= 1.04 * exact
    assert slabs[0].pinned <= 1.001 * (exact + 2 * 4 * 10**6)
    # Nothing comes from torch's allocator, which rounds up to powers of two.
    mine[0].grad = torch.zeros_like(mine[0])
    optimizer.step()
    assert torch.cuda.memory.host_memory_stats().get("allocated_bytes.current", 0) == before
    optimizer.close()
    slabs[0].close()


def test_weights_are_read_and_refreshed_on_the_device() -> None:
    mine = parameters_on(device())
    with streamed(mine, SlowComputation(device()), split=0) as optimizer:
        assert torch.equal(flat(list(optimizer.masters.values())), flat(mine))
        narrow(mine)
        for master in optimizer.masters.values():
            master.mul_(2)
        optimizer.refresh_weights()
        # At once: the copies are past.
        doubled = flat(list(optimizer.masters.values()))
        for master in optimizer.masters.values():
            master.zero_()
        assert torch.equal(flat(mine), doubled.bfloat16())


def test_after_an_error_no_copy_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(7)
    mine = parameters_on(device())
    lanes = SlowLanes(device())
    with streamed(mine, lanes, split=0.5) as optimizer:
        narrow(mine)
        for parameter, gradient in zip(mine, gradients(1), strict=True):
            parameter.grad = gradient
        with monkeypatch.context() as patch:
            patch.setattr(processor, "update", lambda parts: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
        before = flat(list(optimizer.masters.values()))
        torch.cuda.synchronize()
        assert torch.equal(flat(list(optimizer.masters.values())), before)
        assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
        optimizer.step()
