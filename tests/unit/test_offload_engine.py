"""The engine: what goes, what stays, and what comes back and when."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from components.offload.engine import Engine
from components.offload.poison import Graves
from components.offload.streams import BesideOnCpu, InLine, lanes_for
from tests.unit.offload_support import (
    CPU,
    ONE,
    TOKENS,
    WIDTH,
    Layer,
    Model,
    Watched,
    inputs,
    made,
    pass_through,
)


@pytest.fixture(params=[False, True], ids=["in line", "beside"])
def lanes(request: pytest.FixtureRequest) -> Watched:
    return Watched(request.param)


@pytest.mark.parametrize("chosen", [[], [0], [0, 1, 2], [2, 4], [5], range(6)], ids=str)
def test_results_are_equal_to_the_bit_and_as_many_are_sent_as_chosen(
    lanes: Watched, chosen: list[int]
) -> None:
    engine = made(6, lanes, chosen, graves=Graves())
    model = Model(store=engine)
    for seed in range(3):
        for got, wanted in zip(
            pass_through(model, engine, seed), pass_through(Model(), seed=seed), strict=True
        ):
            assert torch.equal(got, wanted)
    assert engine.counts.offloaded == lanes.sent == 3 * len(chosen)
    assert engine.counts.nbytes == 3 * len(chosen) * ONE
    assert engine.counts.left.total() == 3 * (6 - len(chosen))
    assert set(engine.counts.left) <= {"not chosen"}


def test_at_most_two_that_came_back_are_alive_and_none_is_copied_twice(lanes: Watched) -> None:
    engine = made(6, lanes, range(6))
    pass_through(Model(store=engine), engine)
    assert lanes.most_alive == (2 if lanes.beside else 1)
    # Beside the computation, the last two had not been let go of when they were needed.
    assert len(lanes.restored) == (4 if lanes.beside else 6)
    assert all(reference.expired() for reference in lanes.restored)


def test_the_next_boundary_is_asked_for_before_the_current_layer_runs() -> None:
    lanes = Watched(beside=True)
    engine = made(6, lanes, range(6))
    model = Model(store=engine)
    asked: list[int] = []
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.register_forward_pre_hook(lambda *unused: asked.append(len(lanes.restored)))
    pass_through(model, engine)
    assert asked[:6] == [0] * 6
    # Recomputed last to first. The last two were still there, and nothing comes before the first.
    assert asked[6:] == [0, 1, 2, 3, 4, 4]


def hand_over(
    engine: Engine, seed: int, originals: list[StorageWeakRef], recalls: list[Any]
) -> None:
    """A boundary whose input nobody else keeps."""
    hidden = inputs(seed)
    originals.append(StorageWeakRef(hidden.untyped_storage()))
    recalls.append(engine.boundary(hidden))


def test_originals_are_let_go_of_but_for_those_of_two_boundaries(lanes: Watched) -> None:
    engine = made(6, lanes, range(6))
    engine.begin()
    originals, recalls = [], []
    for seed in range(5):
        hand_over(engine, seed, originals, recalls)
        gc.collect()
        alive = sum(not reference.expired() for reference in originals)
        assert alive == (min(seed + 1, 2) if lanes.beside else 0)
    if lanes.beside:
        assert lanes.waited == ["sent 1", "sent 2", "sent 3"]
    for seed in reversed(range(5)):
        assert torch.equal(recalls.pop()(), inputs(seed))
    engine.end()


def test_originals_that_backward_used_are_let_go_of_at_the_next_boundary(lanes: Watched) -> None:
    engine = made(6, lanes, range(6))
    engine.begin()
    originals, recalls = [], []
    for seed in range(5):
        hand_over(engine, seed, originals, recalls)
    for seed in (4, 3, 2):
        found = recalls.pop()()
        assert torch.equal(found, inputs(seed))
        del found
        gc.collect()
        # The one in use, and the one before it.
        alive = [n for n, reference in enumerate(originals) if not reference.expired()]
        assert alive == ([n for n in (3, 4) if n <= seed] if lanes.beside else [])
    engine.end()


def test_a_dropped_recall_gives_its_place_back(lanes: Watched) -> None:
    engine = made(1, lanes, range(9))
    engine.begin()
    for seed in range(3):
        assert torch.equal(engine.boundary(inputs(seed))(), inputs(seed))
    assert engine.counts.offloaded == 3


def test_what_finds_no_place_stays_and_is_counted(lanes: Watched) -> None:
    engine = made(2, lanes, range(6))
    assert all(map(torch.equal, pass_through(Model(store=engine), engine), pass_through(Model())))
    assert (engine.counts.offloaded, engine.counts.left) == (2, {"no room": 4})


def test_a_boundary_that_stayed_still_starts_the_one_before_it() -> None:
    lanes = Watched(beside=True)
    engine = made(6, lanes, [0, 1])
    engine.begin()
    recalls = [engine.boundary(inputs(seed)) for seed in range(4)]
    recalls.pop()()
    assert len(lanes.restored) == 0
    recalls.pop()()
    assert len(lanes.restored) == 1
    assert torch.equal(recalls.pop()(), inputs(1))
    assert len(lanes.restored) == 2


def test_the_same_tensor_saved_twice_is_copied_once_and_lives_until_both_are_gone(
    lanes: Watched,
) -> None:
    engine = made(4, lanes, range(9))
    engine.begin()
    hidden = inputs()
    first, second = engine.boundary(hidden), engine.boundary(hidden.view(WIDTH, TOKENS))
    assert lanes.sent == 1
    del hidden
    wanted = inputs()
    assert torch.equal(second(), wanted.view(WIDTH, TOKENS))
    del second
    gc.collect()
    assert torch.equal(first(), wanted)
    assert engine.counts.offloaded == 2 and engine.counts.nbytes == ONE


def test_new_content_in_the_same_memory_is_another_tensor() -> None:
    engine = made(4, InLine(CPU), range(9))
    engine.begin()
    hidden = inputs()
    first = engine.boundary(hidden)
    with torch.no_grad():
        hidden.add_(1)
    second = engine.boundary(hidden)
    del hidden
    assert torch.equal(first(), inputs())
    assert torch.equal(second(), inputs() + 1)


def test_memory_reused_for_another_tensor_is_not_taken_for_the_first(lanes: Watched) -> None:
    engine = made(50, lanes, range(99))
    engine.begin()
    recalls = [engine.boundary(inputs(seed)) for seed in range(40)]
    for seed in reversed(range(40)):
        assert torch.equal(recalls.pop()(), inputs(seed))


@pytest.mark.parametrize("form", ["transposed", "expanded", "offset strides"])
def test_layouts_come_back_as_they_were(lanes: Watched, form: str) -> None:
    engine = made(4, lanes, range(9))
    engine.begin()
    hidden = inputs()
    if form == "transposed":
        hidden = hidden.t()
    elif form == "expanded":
        hidden = hidden.unsqueeze(1).expand(-1, 4, -1)
    else:
        hidden = hidden.view(2, -1, WIDTH).transpose(0, 1)
    wanted = (hidden.detach().clone(), hidden.stride())
    recall = engine.boundary(hidden)
    assert lanes.sent == 1
    del hidden
    back = recall()
    assert torch.equal(back, wanted[0]) and back.stride() == wanted[1]
    assert not back.requires_grad


class Odd(torch.Tensor):
    """A tensor that may be anything underneath."""


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: nn.Parameter(torch.ones(TOKENS, WIDTH)), "parameter"),
        (lambda: inputs()[: TOKENS // 2], "part of a storage"),
        (lambda: torch.arange(TOKENS * WIDTH), "not floating point"),
        (lambda: torch.ones(3).requires_grad_() * 1, "small"),
        (lambda: torch.ones(TOKENS, WIDTH), "without gradient"),
        (lambda: torch.ones(TOKENS, WIDTH).as_subclass(Odd), "tensor subclass"),
        (lambda: torch.ones(TOKENS, WIDTH, device="meta"), "other device"),
    ],
)
def test_what_would_free_nothing_stays_for_a_stated_reason(
    lanes: Watched, tensor: object, reason: str
) -> None:
    engine = made(4, lanes, range(9), smallest=64)
    engine.begin()
    saved = tensor()  # type: ignore[operator]
    back = engine.boundary(saved)()
    assert engine.counts.left == {reason: 1}
    assert lanes.sent == 0
    assert back is not saved and not back.requires_grad
    assert back.device.type == "meta" or back.data_ptr() == saved.data_ptr()


def test_held_tensors_go_where_their_boundary_went_and_come_back_any_number_of_times(
    lanes: Watched,
) -> None:
    engine = made(6, lanes, [1], graves=Graves())
    engine.begin()
    kept: list[list] = []
    for number in range(3):
        boundary = engine.boundary(inputs(number))
        kept.append([boundary, *(engine.hold(inputs(10 * number + i).detach()) for i in (1, 2))])
    assert lanes.sent == 3 and engine.counts.held == 2
    for number in reversed(range(3)):
        recalls = kept.pop()
        assert torch.equal(recalls[0](), inputs(number))
        for _ in range(2):
            for i in (1, 2):
                assert torch.equal(recalls[i](), inputs(10 * number + i))


def test_a_kept_output_of_a_layer_is_asked_for_one_ahead_and_never_for_nothing() -> None:
    lanes = Watched(beside=True)
    engine = made(20, lanes, range(9))
    engine.begin()
    boundary = engine.boundary(inputs())
    held = [engine.hold(inputs(i).detach()) for i in (1, 2, 3)]
    # Two later boundaries: the originals of the first and of what was held are gone.
    later = [engine.boundary(inputs(i)) for i in (8, 9)]
    boundary()
    assert len(lanes.restored) == 2
    for count, recall in zip((3, 4, 4), held, strict=True):
        recall()
        assert len(lanes.restored) == count
    # A second run through the last of them only.
    held[2]()
    assert len(lanes.restored) == 5
    # As often as the last by now, which will not be asked for again.
    held[1]()
    assert len(lanes.restored) == 6
    del later


def test_outside_a_micro_batch_everything_stays(lanes: Watched) -> None:
    engine = made(6, lanes, range(6))
    model = Model(store=engine)
    assert all(map(torch.equal, pass_through(model), pass_through(Model())))
    with torch.no_grad():
        model(inputs())
    engine.hold(inputs().detach())
    assert lanes.sent == 0
    engine.begin()
    engine.hold(inputs().detach())
    assert lanes.sent == 0


def test_micro_batches_do_not_add_up() -> None:
    engine = made(6, Watched(beside=True), range(6))
    model = Model(store=engine)
    for seed in range(4):
        pass_through(model, engine, seed)
    assert engine.counts.offloaded == 24 and not engine.counts.left


def test_lanes_follow_the_device_and_the_setting() -> None:
    assert type(lanes_for(CPU, False)) is InLine
    assert type(lanes_for(CPU, True)) is BesideOnCpu
