"""What recomputed layers hold between forward and backward, and after an error."""

import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch

from components.recompute.tape import recomputing
from tests.unit.recompute_support import DEPTH, assert_same, build, layers, loss_of, step

GLM = [{"every": k} for k in (1, 2, 3, 4)]
GLM += [{"every": k, "keep_sublayers": True} for k in (2, 3, 4)]

_LIVE: list[weakref.ref] = []


class Memory(bytearray):
    """Memory of a tensor whose end can be watched."""


class Watched(torch.autograd.Function):
    """The same values in memory that is counted as long as anything holds it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        memory = Memory(x.detach().contiguous().numpy().tobytes())
        _LIVE.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@cache
def undisturbed() -> dict[str, torch.Tensor]:
    """What a step of the plain model leaves behind."""
    return step(build("glm"))


def live() -> int:
    gc.collect()
    return sum(reference() is not None for reference in _LIVE)


@pytest.mark.parametrize(
    ("name", "every", "kept"),
    [("glm", 1, 4), ("glm", 2, 2), ("glm", 3, 2), ("glm", 4, 1), ("llama3", 3, 2), ("moe", 2, 2)],
)
def test_one_input_per_segment_is_alive_between_forward_and_backward(
    name: str, every: int, kept: int
) -> None:
    _LIVE.clear()
    model, peaks = build(name, every=every), []
    for layer in layers(model):
        layer.register_forward_pre_hook(lambda _, args: (Watched.apply(args[0]), *args[1:]))
    loss = loss_of(model)
    assert len(_LIVE) == len(layers(model))
    assert live() == kept
    for layer in layers(model):
        layer.get_submodule("_checkpoint_wrapped_module").register_forward_hook(
            lambda _, args, out: peaks.append(live()) if recomputing() else None
        )
    loss.backward()
    assert live() == 0
    assert max(peaks) == kept


@pytest.mark.parametrize("every", [2, 3, 4])
def test_rebuilt_inputs_die_with_their_layers(every: int) -> None:
    _LIVE.clear()
    model, peaks = build("glm", every=every), []

    def watch(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        if recomputing() and not torch.is_grad_enabled():
            out = Watched.apply(out)
            peaks.append(live())
            return out
        return None

    for layer in layers(model):
        layer.get_submodule("_checkpoint_wrapped_module").register_forward_hook(watch)
    loss_of(model).backward()
    assert max(peaks) == every - 1
    assert live() == 0


class Broken(RuntimeError):
    """What the tests throw."""


@pytest.mark.parametrize("settings", GLM)
@pytest.mark.parametrize("moment", ["forward", "rebuild", "replay"])
@pytest.mark.parametrize("place", [0, 2])
def test_after_an_error_the_next_step_is_right_to_the_bit(
    settings: dict, moment: str, place: int
) -> None:
    model = build("glm", **settings)
    modes = {
        "forward": lambda: not recomputing(),
        "rebuild": lambda: recomputing() and not torch.is_grad_enabled(),
        "replay": lambda: recomputing() and torch.is_grad_enabled(),
    }
    block = layers(model)[place].get_submodule("_checkpoint_wrapped_module")

    def fail(*unused: Any) -> None:
        if modes[moment]():
            raise Broken(moment)

    hook = block.ffn_hc.register_forward_hook(fail)
    rebuilt = place % settings["every"] != settings["every"] - 1 and place != DEPTH - 1
    if moment == "rebuild" and not rebuilt:
        step(model)
    else:
        with pytest.raises(Broken):
            loss_of(model).backward()
        assert torch.is_grad_enabled()
        assert not recomputing()
        for name, buffer in model.named_buffers():
            if "tokens_per_expert" in name:
                buffer.zero_()
    hook.remove()
    assert_same(step(model), undisturbed())
