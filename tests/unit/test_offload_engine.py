"""The engine: what goes, what stays, what comes back and when, and what errors leave behind."""

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from components.offload.engine import Engine
from components.offload.poison import Graves, spoil
from components.offload.slabs import Slab
from components.offload.streams import BesideOnCpu, InLine, lanes_for
from components.recompute.layer import RecomputedLayer

CPU = torch.device("cpu")
WIDTH, TOKENS = 8, 16
ONE = WIDTH * TOKENS * 4
"""Bytes of one boundary of ``Model``."""


class Watched(BesideOnCpu):
    """Counts copies and what they brought back that is alive."""

    def __init__(self, beside: bool) -> None:
        super().__init__(CPU)
        self.beside = beside  # type: ignore[misc]
        self.restored: list[StorageWeakRef] = []
        self.most_alive = 0
        self.sent = 0
        self.waited: list[object] = []

    def offload(self, source: torch.Tensor, target: torch.Tensor) -> object:
        super().offload(source, target)
        self.sent += 1
        return f"sent {self.sent}"

    def restore(self, source: torch.Tensor, after: object) -> tuple[torch.Tensor, object]:
        memory, _ = super().restore(source, after)
        self.restored.append(StorageWeakRef(memory.untyped_storage()))
        alive = sum(not reference.expired() for reference in self.restored)
        self.most_alive = max(self.most_alive, alive)
        return memory, f"restored {len(self.restored)}"

    def wait(self, mark: object) -> None:
        self.waited.append(mark)


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=random) / WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.weight)


class Model(nn.Module):
    """Layers that the engine is the store of."""

    def __init__(self, count: int = 6, store: Engine | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RecomputedLayer(Layer(seed)) for seed in range(count))
        if store is not None:
            for layer in self.layers:
                layer.store = store  # type: ignore[assignment]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def inputs(seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 + seed)
    # Not a leaf: boundaries of a model are computed.
    return torch.randn(TOKENS, WIDTH, generator=random).requires_grad_() * 1


def pass_through(model: Model, engine: Engine | None = None, seed: int = 0) -> list[torch.Tensor]:
    """Loss and gradients of one micro-batch."""
    model.zero_grad()
    if engine is not None:
        engine.begin()
    loss = model(inputs(seed)).square().mean()
    loss.backward()
    if engine is not None:
        engine.end()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def made(places: int, lanes: object, chosen: Iterator[int] | range, **more: object) -> Engine:
    return Engine(Slab(places * ONE, CPU), lanes, CPU, chosen, **more)  # type: ignore[arg-type]


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


def test_originals_are_let_go_of_but_for_those_of_two_boundaries(lanes: Watched) -> None:
    engine = made(6, lanes, range(6))
    engine.begin()
    originals, recalls = [], []
    for seed in range(5):
        hidden = inputs(seed)
        originals.append(StorageWeakRef(hidden.untyped_storage()))
        recalls.append(engine.boundary(hidden))
        del hidden
        gc.collect()
        alive = sum(not reference.expired() for reference in originals)
        assert alive == (min(seed + 1, 2) if lanes.beside else 0)
    if lanes.beside:
        assert lanes.waited == ["sent 1", "sent 2", "sent 3"]
    for seed in reversed(range(5)):
        assert torch.equal(recalls.pop()(), inputs(seed))
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


def test_lanes_follow_the_device_and_the_setting() -> None:
    assert type(lanes_for(CPU, False)) is InLine
    assert type(lanes_for(CPU, True)) is BesideOnCpu
