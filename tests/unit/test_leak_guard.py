"""The leak guard lets honest models train unchanged, and names what keeps an activation alive."""

import gc
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from components.context_parallel.order import Order
from components.core.base import Component
from components.titan.memory.holders import held_by_modules, tensors_in
from components.titan.memory.leak_guard import ActivationLeak, LeakGuard
from components.titan.memory.places import in_backward
from components.titan.trainer import RecipeTrainer
from tests.training import full, losses, small_overrides, train, write_corpus


def router_of(trainer: RecipeTrainer) -> nn.Module:
    layers = trainer.model_parts[0].get_submodule("layers")
    return [m for name, m in layers.named_modules() if name.endswith("moe.router")][-1]


class KeepOnRouter(Component):
    """A router that remembers its probabilities, graph and all."""

    name = "keep_on_router"

    def on_built(self, trainer: RecipeTrainer) -> None:
        def keep(router: nn.Module, args: Any, output: Any) -> None:
            router.last_scores = next(o for o in output if o.requires_grad)

        router_of(trainer).register_forward_hook(keep)


class KeepOnDispatcher(Component):
    """A plain object behind the router that collects detached probabilities in a list."""

    name = "keep_on_dispatcher"

    def on_built(self, trainer: RecipeTrainer) -> None:
        router = router_of(trainer)
        router.dispatcher = SimpleNamespace(history=deque(maxlen=1))

        def keep(router: nn.Module, args: Any, output: Any) -> None:
            router.dispatcher.history.append(next(o for o in output if o.requires_grad).detach())

        router.register_forward_hook(keep)


class TablesOnRouter(Component):
    """A router that asks for the tables of documents which every batch has anew."""

    name = "tables_on_router"

    def on_built(self, trainer: RecipeTrainer) -> None:
        lengths = iter(range(1000, 2000))

        def ask(router: nn.Module, args: Any, output: Any) -> None:
            Order.of((1, next(lengths)), (1, 0)).batch_of_packed(torch.device("cpu"))

        router_of(trainer).register_forward_hook(ask)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("leak") / "corpus")


def guarded(corpus: Path, recompute: bool, *more: str) -> list[str]:
    return [
        *small_overrides(corpus),
        "debug.leak_guard=true",
        f"components.full_recompute.enabled={str(recompute).lower()}",
        "training.steps=2",
        "training.global_batch_size=4",
        *more,
    ]


@pytest.mark.parametrize("recompute", [False, True])
def test_router_probabilities_kept_with_their_graph_are_named(
    tmp_path: Path, corpus: Path, recompute: bool
) -> None:
    leaky = KeepOnRouter(Component.Config())
    with pytest.raises(ActivationLeak) as raised:
        train(tmp_path, guarded(corpus, recompute), components=[leaky])
    message = str(raised.value)
    assert "debug.leak_guard: " in message
    assert "moe.router.last_scores (" in message and "with its graph (" in message
    # 2 sequences of 128 tokens, 2 experts each.
    assert "float32 [" in message and "2.0 KiB" in message
    work = "recompute" if recompute else "forward"
    assert f"in the {work} of layers." in message
    assert ("after its layer's backward" if recompute else "after the micro-batch") in message


@pytest.mark.parametrize("recompute", [False, True])
def test_probabilities_kept_by_an_object_behind_a_module_are_named(
    tmp_path: Path, corpus: Path, recompute: bool
) -> None:
    leaky = KeepOnDispatcher(Component.Config())
    with pytest.raises(ActivationLeak, match=r"moe\.router\.dispatcher\.history\[0\] \("):
        train(tmp_path, guarded(corpus, recompute), components=[leaky])


def test_tables_of_documents_outlive_the_layer_that_asked_for_them(
    tmp_path: Path, corpus: Path
) -> None:
    settings = guarded(corpus, True, "training.seq_len=64", "checkpoint.enable=false")
    train(tmp_path, settings, components=[TablesOnRouter(Component.Config())])
    assert len(losses(tmp_path)) == 2


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        "moe_debug",
        "glm_flash_tiny",
        "llama3_debug",
        # Gigabytes of memory.
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_the_models_pass_and_train_the_same_to_the_bit(
    tmp_path: Path, corpus: Path, model: str, recompute: bool
) -> None:
    more = [f"model={model}"]
    if model == "deepseek_v3":
        more = ["model=llama3_debug", f"model.family={model}", "model.flavor=debugmodel"]
    settings = [o for o in guarded(corpus, recompute) if not o.startswith("model=")] + more
    settings += ["checkpoint.enable=false", "training.seq_len=64"]
    on = train(tmp_path / "on", settings, use=trained)
    off = train(tmp_path / "off", [*settings, "debug.leak_guard=false"], use=trained)
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    assert on and all(torch.equal(on[name], off[name]) for name in on)


def trained(trainer: RecipeTrainer) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: full(p) for name, p in trainer.model_parts[0].named_parameters()}


class Layer(nn.Module):
    """Keeps what it is told to keep."""

    def __init__(self, keep: Callable[["Layer", torch.Tensor], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).sigmoid()
        self.keep(self, h)
        return x + h


class Model(nn.Module):
    def __init__(self, keep: Callable[[Layer, torch.Tensor], None], recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Layer(keep) for i in range(3)})
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=False, early_stop=False)
            else:
                x = layer(x)
        return x


def pass_through(
    keep: Callable[[Layer, torch.Tensor], None], recompute: bool, passes: int = 2
) -> LeakGuard:
    model = Model(keep, recompute)
    guard = LeakGuard(SimpleNamespace(model_parts=[model]))
    for _ in range(passes):
        with guard.microbatch():
            loss = model(torch.ones(4, 8)).sum()
            loss.backward()
    return guard


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_that_keeps_nothing_passes(recompute: bool) -> None:
    guard = pass_through(lambda layer, h: None, recompute)
    made = {str(each.place) for each in guard._made.values()}
    again = "recompute of layers.2.inner"
    assert {"forward of layers.0", "forward of layers.1.inner"} <= made
    assert (again in made) == recompute


@pytest.mark.parametrize("recompute", [False, True])
def test_a_cache_that_is_filled_once_passes(recompute: bool) -> None:
    def cache(layer: Layer, h: torch.Tensor) -> None:
        if not hasattr(layer, "table"):
            layer.table = torch.arange(8) * 2

    pass_through(cache, recompute, passes=3)


def test_single_numbers_may_be_kept_but_not_with_their_graph() -> None:
    pass_through(lambda layer, h: setattr(layer, "mean", h.mean().detach()), recompute=True)
    with pytest.raises(ActivationLeak, match=r"layers\.2\.mean \(Layer\), with its graph"):
        pass_through(lambda layer, h: setattr(layer, "mean", h.mean()), recompute=True)


ELSEWHERE: dict[str, torch.Tensor] = {}


def test_a_tensor_held_outside_of_the_model_is_described() -> None:
    try:
        with pytest.raises(ActivationLeak, match="held by a dict under 'last'"):
            pass_through(lambda layer, h: ELSEWHERE.update(last=h.detach()), recompute=False)
    finally:
        ELSEWHERE.clear()


class Again(torch.autograd.Function):
    """Runs a module in forward, and once more in backward, for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.part = part
        return part(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.part(x).backward(gradient)
        return x.grad, None


class Part(nn.Module):
    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self._keep = kept.append

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).sigmoid()
        if in_backward():
            self._keep(h.detach())
        return h * 2


class InParts(nn.Module):
    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.part = Part(kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Again.apply(x, self.part)


def test_what_a_part_keeps_when_it_runs_again_in_its_layers_backward_is_a_leak() -> None:
    kept: list[torch.Tensor] = []
    model = Model(lambda layer, h: None, recompute=False)
    model.layers["1"] = InParts(kept)
    guard = LeakGuard(SimpleNamespace(model_parts=[model]))
    with pytest.raises(ActivationLeak) as raised:
        for _ in range(2):
            with guard.microbatch():
                model(torch.ones(4, 8)).sum().backward()
    assert "made by aten.sigmoid.default in the backward of layers.1.part" in str(raised.value)


def test_a_tensor_in_a_reference_cycle_is_told_apart() -> None:
    def circle(layer: Layer, h: torch.Tensor) -> None:
        ring: list[Any] = [h.detach()]
        ring.append(ring)

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ActivationLeak, match="a reference cycle, until Python collects"):
            pass_through(circle, recompute=False)
    finally:
        gc.enable()


def test_a_graph_that_backward_did_not_reach_is_named_by_who_keeps_it() -> None:
    class Extra(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            ctx.hidden = h * 2
            return h.sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.hidden

    def side_loss(layer: Layer, h: torch.Tensor) -> None:
        layer.side_loss = Extra.apply(h)

    with pytest.raises(ActivationLeak) as raised:
        pass_through(side_loss, recompute=False)
    assert "layers.0.side_loss (Layer), with its graph (ExtraBackward)" in str(raised.value)


def test_the_error_comes_in_backward_and_leaves_the_model_usable() -> None:
    kept: list[torch.Tensor] = []

    def keep(layer: Layer, h: torch.Tensor) -> None:
        if layer is model.layers["2"] and in_backward():
            kept.append(h)

    model = Model(keep, recompute=True)
    guard = LeakGuard(SimpleNamespace(model_parts=[model]))
    with pytest.raises(ActivationLeak, match="of layers.2 alive after its layer's backward"):
        for _ in range(2):
            with guard.microbatch():
                model(torch.ones(4, 8)).sum().backward()
    for layer in model.layers.values():
        layer.keep = lambda layer, h: None
    kept.clear()
    model.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not model.layers["0"]._forward_hooks


def test_tensors_are_found_behind_objects_containers_and_closures() -> None:
    tensor = torch.ones(2)

    class Slots:
        __slots__ = ("held",)

    slotted = Slots()
    slotted.held = (tensor,)
    things = {
        "x.a.held[0]": SimpleNamespace(a=slotted),
        "x['k'][1]": {"k": [0, tensor]},
        "x.args[0]": partial(print, tensor),
        "x.tensor (closure)": lambda: tensor,
    }
    for path, thing in things.items():
        found = [p for p, t in tensors_in(thing, "x", 5, set()) if t is tensor]
        assert path in found
    deep: Any = tensor
    for _ in range(6):
        deep = [deep]
    assert list(tensors_in(deep, "x", 5, set())) == []


def test_parameters_and_plain_buffers_are_kept_on_purpose() -> None:
    module = nn.BatchNorm1d(3)
    assert held_by_modules([module]) == []
    module.scale = torch.ones(1, requires_grad=True) * 2
    assert [holder.path for holder in held_by_modules([module])] == ["BatchNorm1d.scale"]
