"""Whole models over the offload engine: the same step to the bit, and after an error as well."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from components.offload.arena import aligned
from components.offload.engine import Engine
from components.offload.poison import Graves
from components.offload.saved import bytes_of
from components.offload.slabs import Slab
from components.offload.streams import lanes_for
from tests.unit.recompute_support import DEPTH, assert_same, build, layers, loss_of

CPU = torch.device("cpu")
PASSES = range(4)
"""Micro-batches of a step."""


def one_step(model: torch.nn.Module, engine: Engine | None = None) -> dict[str, torch.Tensor]:
    """Losses and accumulated gradients of four micro-batches, by name."""
    model.zero_grad()
    left: dict[str, torch.Tensor] = {}
    for seed in PASSES:
        if engine is not None:
            engine.begin()
        loss = loss_of(model, seed)
        loss.backward()
        left[f"loss {seed}"] = loss.detach()
        if engine is not None:
            engine.end()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            left[name.replace("_checkpoint_wrapped_module.", "")] = parameter.grad.clone()
    return left


@cache
def expected(name: str) -> dict[str, torch.Tensor]:
    return one_step(build(name))


@cache
def boundary_bytes(name: str) -> int:
    """Bytes of the input of one layer."""
    sizes = []
    model = build(name)
    first = next(iter(model.layers.values()))
    handle = first.register_forward_pre_hook(
        lambda module, args: sizes.append(bytes_of(args[0]).numel())
    )
    loss_of(model)
    handle.remove()
    return sizes[0]


def offloaded(name: str, every: int, places: float, beside: bool) -> tuple[torch.nn.Module, Engine]:
    """A recomputed model and an engine with room for so many boundaries."""
    model = build(name, every=every)
    size = aligned(boundary_bytes(name))
    slab = Slab(max(int(places * size), 1), CPU)
    engine = Engine(slab, lanes_for(CPU, beside), CPU, range(int(places)), graves=Graves())
    for layer in layers(model):
        layer.store = engine
    return model, engine


@pytest.mark.parametrize(
    ("name", "every", "places", "beside"),
    [
        *((name, *case) for name in ("glm", "moe") for case in ((1, 9, True), (3, 1, False))),
        *((name, 2, 9, True) for name in ("glm", "moe", "llama3")),
    ],
)
def test_a_step_of_four_micro_batches_is_the_same_to_the_bit(
    name: str, every: int, places: int, beside: bool
) -> None:
    model, engine = offloaded(name, every, places, beside)
    assert_same(one_step(model, engine), expected(name))
    boundaries = -(-DEPTH // every)
    sent = min(places, boundaries)
    assert engine.counts.offloaded == 4 * sent
    assert engine.counts.nbytes == 4 * sent * boundary_bytes(name)
    assert engine.counts.left.total() == 4 * (boundaries - sent)


@pytest.mark.parametrize("name", ["glm", "moe"])
@pytest.mark.parametrize("places", [0, 0.5, 1.5, 4])
@pytest.mark.parametrize("beside", [False, True], ids=["in line", "beside"])
def test_any_budget_gives_the_same_step(name: str, places: float, beside: bool) -> None:
    model, engine = offloaded(name, 1, places, beside)
    assert_same(one_step(model, engine), expected(name))
    assert engine.counts.offloaded == 4 * int(places)


class Fault(Exception):
    """Raised in the middle of backward."""


def fail_in_backward(layer: torch.nn.Module) -> Callable[[], None]:
    """Until the result is called."""

    def fail(*unused: object) -> None:
        raise Fault

    return layer.register_full_backward_pre_hook(fail).remove


@pytest.mark.parametrize("name", ["glm", "moe"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("beside", [False, True], ids=["in line", "beside"])
def test_a_step_after_an_error_in_backward_is_the_same_to_the_bit(
    name: str, every: int, beside: bool
) -> None:
    model, engine = offloaded(name, every, 9, beside)
    mend = fail_in_backward(layers(model)[1])
    engine.begin()
    loss = loss_of(model, 7)
    with pytest.raises(Fault):
        loss.backward()
    mend()
    # The graph of what failed is still there.
    assert_same(one_step(model, engine), expected(name))
    assert loss.requires_grad
