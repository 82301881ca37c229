"""On a GPU: offloaded boundaries with slow streams and poisoned memory change no bit."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torchtitan.tools.utils
from torch import nn

from components.offload.arena import aligned
from components.offload.engine import Engine
from components.offload.poison import Graves
from components.offload.slabs import Slab, cpus_near
from components.offload.streams import InLine, Lanes, SideStreams
from components.recompute.layer import RecomputedLayer
from tests.training import losses, metrics, small_overrides, train, write_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

LAYERS, TOKENS, WIDTH = 8, 4096, 1024
BOUNDARY = TOKENS * WIDTH * 2
"""Bytes: 8 MiB in bfloat16."""
SLOW = 2_000_000
"""Clock cycles that the slowest copies and steps of the computation are made to wait: about 1 ms,
many times what a copy of a boundary takes."""


class Layer(nn.Module):
    """As much memory inside as several boundaries, so that freed blocks are soon used again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.stall = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.stall:
            torch.cuda._sleep(random.randrange(self.stall))
        return hidden + self.down(torch.tanh(self.up(torch.rms_norm(hidden, (WIDTH,)))))


class SlowStreams(SideStreams):
    """Copies that begin late, by a different delay each time."""

    def _delay(self, stream: torch.cuda.Stream) -> None:
        torch.cuda._sleep(random.randrange(SLOW))


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def make_model(stall: int = 0) -> nn.ModuleList:
    torch.manual_seed(0)
    model = nn.ModuleList(RecomputedLayer(Layer()) for _ in range(LAYERS))
    for module in model.modules():
        if isinstance(module, Layer):
            module.stall = stall
    return model.to(device(), torch.bfloat16)


@contextmanager
def offloading(
    model: nn.ModuleList, lanes: Lanes, chosen: range | list[int], graves: Graves | None = None
) -> Iterator[Engine]:
    slab = Slab(max(len(chosen), 1) * aligned(BOUNDARY), device(), cpus_near(device()))
    engine = Engine(slab, lanes, device(), chosen, smallest=2**20, graves=graves)
    for layer in model:
        layer.store = engine
    try:
        yield engine
    finally:
        engine.close()
        slab.close()


def one_pass(model: nn.ModuleList, engine: Engine | None, seed: int) -> torch.Tensor:
    """Forward and backward of one micro-batch; its loss."""
    generator = torch.Generator(device=device()).manual_seed(seed)
    draw = torch.randn(TOKENS, WIDTH, generator=generator, device=device())
    hidden = draw.to(torch.bfloat16).requires_grad_() * 1
    del draw
    if engine is not None:
        engine.begin()
    for layer in model:
        hidden = layer(hidden)
    loss = hidden.float().square().mean()
    del hidden
    loss.backward()
    if engine is not None:
        engine.end()
    return loss.detach()


def twenty_steps(model: nn.ModuleList, engine: Engine | None) -> list[torch.Tensor]:
    """Losses of 20 steps of two micro-batches each, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept = []
    for step in range(20):
        optimizer.zero_grad()
        kept += [one_pass(model, engine, 2 * step + part) for part in range(2)]
        optimizer.step()
    return [*kept, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.fixture(scope="module")
def without() -> list[torch.Tensor]:
    return twenty_steps(make_model(), None)


def assert_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(bool(value.isfinite().all()) for value in expected)
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not a.equal(b)] == []


@pytest.mark.parametrize("chosen", [range(LAYERS), [0, 1, 4, 6]], ids=["all", "some"])
@pytest.mark.parametrize("poison", [False, True], ids=["", "poison"])
@pytest.mark.parametrize("kind", ["in line", "streams", "slow streams", "slow computation"])
def test_twenty_steps_are_the_same_to_the_bit(
    kind: str, poison: bool, chosen: range | list[int], without: list[torch.Tensor]
) -> None:
    random.seed(1)
    lanes: Lanes = {
        "in line": InLine, "streams": SideStreams, "slow streams": SlowStreams,
        "slow computation": SideStreams,
    }[kind](device())  # fmt: skip
    model = make_model(stall=SLOW if kind == "slow computation" else 0)
    with offloading(model, lanes, chosen, Graves() if poison else None) as engine:
        assert_bits(twenty_steps(model, engine), without)
    assert engine.counts.offloaded == 40 * len(chosen)


def test_the_stream_in_use_is_asked_for_at_every_use(without: list[torch.Tensor]) -> None:
    """The engine is made on one stream and used on another."""
    random.seed(2)
    model = make_model()
    with offloading(model, SlowStreams(device()), range(LAYERS), Graves()) as engine:
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            found = twenty_steps(model, engine)
        torch.cuda.current_stream().wait_stream(other)
        assert_bits(found, without)


def test_a_wait_that_is_left_out_is_noticed() -> None:
    """What keeps the tests above from passing whatever the engine does."""

    class Careless(SlowStreams):
        def wait(self, mark: object) -> None:
            """Nobody waits for a copy."""

    random.seed(3)
    model, expected = make_model(), make_model()
    with offloading(model, Careless(device()), range(LAYERS), Graves()) as engine:
        found = [one_pass(model, engine, seed) for seed in range(4)]
    wanted = [one_pass(expected, None, seed) for seed in range(4)]
    gradients = zip(model.parameters(), expected.parameters(), strict=True)
    same = all(a.equal(b) for a, b in zip(found, wanted, strict=True))
    assert not (same and all(a.grad.equal(b.grad) for a, b in gradients))  # type: ignore[union-attr]


def test_a_slab_is_pinned_and_exact() -> None:
    payload = 5 * 2**20 + 12_345
    before = torch.cuda.memory.host_memory_stats().get("allocated_bytes.current", 0)
    slab = Slab(payload, device(), cpus_near(device()))
    assert slab.view(0, payload).is_pinned()
    assert payload <= slab.pinned <= 1.02 * payload
    assert torch.cuda.memory.host_memory_stats().get("allocated_bytes.current", 0) == before
    source = torch.randint(256, (payload,), dtype=torch.uint8, device=device())
    slab.view(0, payload).copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(slab.view(0, payload), source.cpu())
    slab.close()


def peak_of(model: nn.ModuleList, engine: Engine | None) -> int:
    for seed in range(2):
        one_pass(model, engine, seed)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    one_pass(model, engine, 2)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("kind", [InLine, SideStreams])
def test_the_peak_is_within_two_boundaries_of_the_bound(kind: type) -> None:
    """The bound: all that is there without, but two boundaries instead of all."""
    model = make_model()
    whole = peak_of(model, None)
    with offloading(model, kind(device()), range(LAYERS)) as engine:
        bounded = peak_of(model, engine)
    assert bounded <= whole - (LAYERS - 2) * BOUNDARY + 2 * BOUNDARY
    assert bounded < whole


def test_after_an_error_in_backward_the_next_micro_batch_is_right() -> None:
    random.seed(4)
    expected, model = make_model(), make_model()
    with offloading(model, SlowStreams(device()), range(LAYERS), Graves()) as engine:

        def fail(*unused: object) -> None:
            raise ZeroDivisionError

        handle = model[LAYERS // 2].register_full_backward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            one_pass(model, engine, 0)
        handle.remove()
        model.zero_grad()
        found = one_pass(model, engine, 1)
    assert found.equal(one_pass(expected, None, 1))
    for name, parameter in expected.named_parameters():
        assert parameter.grad.equal(model.get_parameter(name).grad), name  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.mark.parametrize("model", ["glm_flash_tiny", "moe_tiny"])
def test_a_run_with_streams_learns_the_same(model: str, corpus: Path, tmp_path: Path) -> None:
    small = [o for o in small_overrides(corpus) if not o.startswith("model=")]
    # One megabyte and more per boundary, or nothing would be worth a copy.
    wide = [f"model={model}", *small, "training.seq_len=2048", "checkpoint.enable=false"]
    recompute = [
        *wide,
        "components.layer_recompute.enabled=true",
        "components.precision_trimming.enabled=false",
    ]
    name = "components.selective_checkpoint_offload"
    train(tmp_path / "off", recompute)
    train(tmp_path / "on", [*recompute, f"{name}.enabled=true", f"{name}.streams=true"])
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=2e-3)
    line = metrics(tmp_path / "on")[-1]
    assert line["offload/boundaries"] > 0 and line["offload/boundaries_left"] == 0
    assert line["offload/pinned_gib"] <= 1.02 * line["offload/payload_gib"]
