"""The engine after errors, and with copies that are as late as they may be."""

import ctypes
import gc
from dataclasses import dataclass

import pytest
import torch

from components.offload.poison import Graves, spoil
from components.offload.streams import BesideOnCpu
from tests.unit.offload_support import CPU, Model, Watched, inputs, made, pass_through


@pytest.fixture(params=[False, True], ids=["in line", "beside"])
def lanes(request: pytest.FixtureRequest) -> Watched:
    return Watched(request.param)


class Fault(Exception):
    """Raised in the middle of backward."""


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise Fault


def test_after_an_error_in_backward_the_next_micro_batch_is_right(lanes: Watched) -> None:
    engine = made(6, lanes, range(6), graves=Graves())
    model = Model(store=engine)
    engine.begin()
    hidden = inputs()
    for number, layer in enumerate(model.layers):
        hidden = layer(Breaks.apply(hidden) if number == 3 else hidden)
    loss = hidden.square().mean()
    with pytest.raises(Fault) as kept:
        loss.backward()
    # The traceback, the graph and its recalls are alive while the next one runs.
    assert kept.tb is not None
    for seed in range(2):
        got = pass_through(model, engine, seed)
        assert all(map(torch.equal, got, pass_through(Model(), seed=seed)))
    assert engine.counts.left == {}
    del loss, hidden, kept
    gc.collect()
    assert all(map(torch.equal, pass_through(model, engine), pass_through(Model())))


def test_a_graph_kept_beyond_its_micro_batch_says_so(lanes: Watched) -> None:
    engine = made(6, lanes, range(6))
    model = Model(store=engine)
    engine.begin()
    loss = model(inputs()).square().mean()
    engine.end()
    with pytest.raises(RuntimeError, match="micro-batch that is over"):
        loss.backward()


def test_an_input_changed_while_its_copy_is_under_way_is_refused() -> None:
    engine = made(6, Watched(beside=True), range(6))
    engine.begin()
    hidden = inputs()
    recall = engine.boundary(hidden)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="changed its input in place"):
        recall()
    with pytest.raises(RuntimeError, match="streams=false"):
        engine.end()


class Late(BesideOnCpu):
    """Every copy is made as late as the engine allows: when it is waited for.

    Memory is named by its address, as in a copy that a GPU has been asked for: what frees it too
    early, frees it.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.pending: list[Copy] = []

    def offload(self, source: torch.Tensor, target: torch.Tensor) -> "Copy":
        return self._later(source, target, None)

    def restore(self, source: torch.Tensor, after: object) -> tuple[torch.Tensor, "Copy"]:
        target = torch.empty_like(source)
        spoil(target)
        assert isinstance(after, Copy)
        return target, self._later(source, target, after)

    def wait(self, mark: object) -> None:
        assert isinstance(mark, Copy)
        mark.make()

    def synchronise(self) -> None:
        for copy in self.pending:
            copy.make()
        self.pending.clear()

    def _later(self, source: torch.Tensor, target: torch.Tensor, after: "Copy | None") -> "Copy":
        copy = Copy(target.data_ptr(), source.data_ptr(), source.numel(), after)
        self.pending.append(copy)
        return copy


@dataclass
class Copy:
    target: int
    source: int
    nbytes: int
    after: "Copy | None"
    made: bool = False

    def make(self) -> None:
        if self.made:
            return
        if self.after is not None:
            self.after.make()
        self.made = True
        ctypes.memmove(self.target, self.source, self.nbytes)


@pytest.mark.parametrize("chosen", [[1, 3], range(6)], ids=str)
def test_copies_made_as_late_as_they_may_be_change_nothing(chosen: list[int]) -> None:
    lanes = Late()
    engine = made(6, lanes, chosen, graves=Graves())
    model = Model(store=engine)
    for seed in range(5):
        got = pass_through(model, engine, seed)
        assert all(map(torch.equal, got, pass_through(Model(), seed=seed)))
    assert len(lanes.pending) > 5 * len(chosen)
    assert all(copy.made for copy in lanes.pending)


def test_poison_spoils_memory_when_its_last_user_is_gone_and_not_before() -> None:
    graves, raw = Graves(), bytearray(64)
    memory = torch.frombuffer(raw, dtype=torch.uint8)
    user = memory.view(torch.float32)
    graves.bury(memory)
    del memory
    assert graves.sweep() == 0 and not any(raw)
    del user
    assert graves.sweep() == 1
    assert torch.frombuffer(raw, dtype=torch.float32).isnan().all()
    assert torch.frombuffer(raw, dtype=torch.bfloat16).isnan().all()


def test_memory_that_is_let_go_of_too_early_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What keeps the tests above from passing whatever the engine does."""
    monkeypatch.setattr(Late, "wait", lambda lanes, mark: mark.make() if mark.after else None)
    engine = made(6, Late(), range(6), graves=Graves())
    model = Model(store=engine)
    got = [tensor for seed in range(3) for tensor in pass_through(model, engine, seed)]
    wanted = [tensor for seed in range(3) for tensor in pass_through(Model(), seed=seed)]
    assert not all(map(torch.equal, got, wanted))


class Synchronised(Watched):
    """Notes when the engine waited for every copy, and how many had been asked for by then."""

    def __init__(self) -> None:
        super().__init__(beside=True)
        self.synchronised: list[int] = []

    def synchronise(self) -> None:
        self.synchronised.append(self.sent)


def test_what_was_brought_back_for_nobody_is_waited_for_before_it_is_let_go_of() -> None:
    lanes = Synchronised()
    engine = made(6, lanes, range(6))
    engine.begin()
    recalls = [engine.boundary(inputs(seed)) for seed in range(5)]
    recalls.pop()()
    recalls.pop()()
    # The copy of the one before has been asked for, and now nobody will take it.
    asked = f"restored {len(lanes.restored)}"
    lanes.waited.clear()
    recalls.pop()
    gc.collect()
    assert asked not in lanes.waited and not lanes.restored[-1].expired()
    recalls.pop()()
    assert asked in lanes.waited and lanes.restored[-2].expired()
    engine.end()


def test_a_recall_that_outlives_its_micro_batch_takes_no_place_from_the_next() -> None:
    engine = made(2, Watched(beside=True), range(6))
    engine.begin()
    late = [engine.boundary(inputs(seed)) for seed in range(2)]
    engine.end()
    engine.begin()
    recalls = [engine.boundary(inputs(seed)) for seed in (3, 4)]
    assert engine.counts.offloaded == 4 and not engine.counts.left
    del late
    gc.collect()
    assert torch.equal(recalls[1](), inputs(4)) and torch.equal(recalls[0](), inputs(3))


def test_poison_spares_a_place_that_belongs_to_another_by_now() -> None:
    engine = made(1, Watched(beside=True), range(6), graves=Graves())
    engine.begin()
    late = [engine.boundary(inputs(0))]
    engine.end()
    engine.begin()
    recall = engine.boundary(inputs(1))
    late.clear()
    gc.collect()
    assert torch.equal(recall(), inputs(1))


def test_copies_are_over_before_places_are_used_again_after_an_error_and_before_the_end() -> None:
    lanes = Synchronised()
    engine = made(6, lanes, range(6))
    engine.begin()
    engine.boundary(inputs(0))
    engine.begin()
    assert lanes.synchronised == [1]
    engine.boundary(inputs(1))
    engine.close()
    assert lanes.synchronised[-1] == 2
