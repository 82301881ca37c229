"""Recomputed layers compute the same bits, and no more often than they must."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn as nn

from components.models.glm_flash.block import rebuilding
from components.models.glm_flash.fused_connections import triton_hyper_connections
from components.models.glm_flash.hyper_connections import HyperConnection
from components.models.glm_flash.indexer import Indexer
from components.models.glm_flash.trimmed import trim
from components.recompute.tape import recomputing
from tests.swaps import swap_parts
from tests.unit.recompute_support import (
    DEPTH,
    MODELS,
    assert_same,
    build,
    layers,
    loss_of,
    noisy_step,
    step,
)

# Micro-batches of one step; one for the models that take seconds.
PASSES = {"glm": 4, "moe": 4, "deepseek_v3": 1, "gpt_oss": 1, "llama3": 1}


def settings_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"every": k} for k in (1, 2, 3, DEPTH)]
    if name == "glm":
        found += [{"every": k, "keep_sublayers": True} for k in (2, 3, 4)]
    return found


def name_of(settings: dict[str, Any]) -> str:
    return f"{settings['every']}{'_kept' if settings.get('keep_sublayers') else ''}"


CASES = [
    pytest.param(
        name,
        settings,
        id=f"{name}-{name_of(settings)}",
        # Seconds and hundreds of megabytes each.
        marks=[pytest.mark.slow] if name == "gpt_oss" and settings["every"] != 3 else [],
    )
    for name in MODELS
    for settings in settings_of(name)
]
GLM = [pytest.param(settings, id=name_of(settings)) for settings in settings_of("glm")]


@cache
def without(name: str, passes: int) -> dict[str, torch.Tensor]:
    """What a step leaves behind without recomputation."""
    return step(build(name), range(passes))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_losses_gradients_and_expert_counts_are_those_without_to_the_bit(
    name: str, settings: dict[str, Any]
) -> None:
    passes = PASSES[name]
    assert_same(step(build(name, **settings), range(passes)), without(name, passes))


@pytest.mark.parametrize("kernels", [False, True], ids=["trimmed", "kernels"])
def test_streams_that_nobody_reads_are_those_of_a_last_run_alone(kernels: bool) -> None:
    """Layers between two kept inputs read what the ones before them return."""

    def change(decoder: Any) -> None:
        trim(decoder, "hyper_connections")
        decoder.layers = [rebuilding(layer) for layer in decoder.layers]
        if kernels:
            swap_parts(decoder, HyperConnection.Config, triton_hyper_connections)

    expected = step(build("glm", change))
    for keep in (False, True):
        assert_same(step(build("glm", change, every=DEPTH, keep_sublayers=keep)), expected)


@pytest.mark.parametrize("settings", GLM)
def test_two_passes_may_run_forward_before_either_runs_backward(settings: dict) -> None:
    expected, model = without("glm", 2), build("glm", **settings)
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    second.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            plain = name.replace("_checkpoint_wrapped_module.", "")
            assert torch.equal(parameter.grad, expected[plain]), name


def test_validation_between_two_passes_keeps_nothing_and_changes_nothing() -> None:
    model = build("glm", every=3)
    model.zero_grad()
    first = loss_of(model, 0)
    model.eval()
    with torch.no_grad():
        again = loss_of(model, 0)
    model.train()
    assert torch.equal(again, first)
    first.backward()
    expected = without("glm", 1)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            plain = name.replace("_checkpoint_wrapped_module.", "")
            assert torch.equal(parameter.grad, expected[plain]), name


@pytest.mark.parametrize("name", ["glm", "moe", "deepseek_v3"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_second_choice_of_experts_that_would_differ_is_not_made(name: str, every: int) -> None:
    """Scores are disturbed in every run but the first: the experts stay, their weights move."""
    model = build(name, every=every)
    seen: list[tuple[str, bool, torch.Tensor, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(7)

    def disturb(module: nn.Module, args: Any) -> Any:
        noise = torch.randn(args[0].shape, generator=generator)
        return (args[0] + noise, *args[1:]) if recomputing() else None

    for path, module in model.named_modules():
        if path.endswith(".router"):
            module.register_forward_pre_hook(disturb)
            module.register_forward_hook(
                lambda module, args, out, path=path: seen.append(
                    (path, recomputing(), out[1], out[2].topk(module.top_k).indices)
                )
            )
    loss_of(model).backward()
    first = {path: ids for path, again, ids, _ in seen if not again}
    second = [(path, ids, own) for path, again, ids, own in seen if again]
    assert len(second) >= len(first) > 0
    for path, ids, own in second:
        assert torch.equal(ids, first[path]), path
        assert not torch.equal(own.sort(-1).values, ids.sort(-1).values), path


@pytest.mark.parametrize("settings", GLM)
def test_a_second_choice_of_pools_that_would_differ_is_not_made(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, choose = without("glm", 1), Indexer.choose
    runs = []

    def contrary(self: Indexer, *args: Any) -> torch.Tensor:
        runs.append(len(runs))
        pools = choose(self, *args)
        return torch.where(pools > 0, pools - 1, pools) if len(runs) > 1 else pools

    monkeypatch.setattr(Indexer, "choose", contrary)
    assert_same(step(build("glm", **settings)), expected)
    assert len(runs) == 1


class Evaluations:
    """Counts forward calls of some modules."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.of = dict.fromkeys(modules, 0)
        for name, module in modules.items():
            module.register_forward_pre_hook(lambda *unused, name=name: self._count(name))

    def _count(self, name: str) -> None:
        self.of[name] += 1


@pytest.mark.parametrize(
    ("settings", "runs", "part_runs"),
    [
        ({"every": 1}, [2, 2, 2, 2], [2, 2, 2, 2]),
        ({"every": 2}, [3, 2, 3, 2], [3, 2, 3, 2]),
        ({"every": 3}, [3, 3, 2, 2], [3, 3, 2, 2]),
        ({"every": 4}, [3, 3, 3, 2], [3, 3, 3, 2]),
        ({"every": 4, "keep_sublayers": True}, [3, 3, 3, 2], [2, 2, 2, 2]),
        ({"every": 3, "keep_sublayers": True}, [3, 3, 2, 2], [2, 2, 2, 2]),
    ],
)
def test_every_layer_runs_as_often_as_it_must(
    settings: dict, runs: list[int], part_runs: list[int]
) -> None:
    model = build("glm", **settings)
    wrapped = [layer.get_submodule("_checkpoint_wrapped_module") for layer in layers(model)]
    blocks = Evaluations({str(place): block for place, block in enumerate(wrapped)})
    mixers = Evaluations(
        {str(n): block.get_submodule("attention") for n, block in enumerate(wrapped)}
    )
    ffns = Evaluations(
        {
            str(n): block.get_submodule("moe" if n else "feed_forward")
            for n, block in enumerate(wrapped)
        }
    )
    loss_of(model).backward()
    assert list(blocks.of.values()) == runs
    assert list(mixers.of.values()) == part_runs
    assert list(ffns.of.values()) == part_runs


def test_a_second_backward_through_one_graph() -> None:
    whole = build("llama3", every=1)
    loss = loss_of(whole)
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in whole.named_parameters()}
    loss.backward()
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter.grad, 2 * once[name]), name

    grouped = loss_of(build("llama3", every=3))
    grouped.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="needs components.layer_recompute.every=1"):
        grouped.backward()


def test_layers_of_a_segment_out_of_order_are_refused() -> None:
    model: Any = build("llama3", every=3)
    model.layers["0"], model.layers["1"] = model.layers["1"], model.layers["0"]
    with pytest.raises(RuntimeError, match="layer 1 of a segment of 3 ran without the one before"):
        loss_of(model)


@pytest.mark.parametrize("every", [1, 3])
def test_autocast_of_forward_is_that_of_recomputation(every: int) -> None:
    gradients = []
    for settings in ({}, {"every": every}):
        model = build("llama3", **settings)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_names_in_a_state_dict_are_those_without() -> None:
    plain, wrapped = build("glm"), build("glm", every=3)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1.0)
    wrapped.load_state_dict(plain.state_dict())
    assert_same(dict(wrapped.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_random_numbers_are_drawn_again_as_they_were(every: int, keep: bool) -> None:
    expected = noisy_step()
    assert_same(noisy_step(every=every, keep_sublayers=keep), expected)
    other = noisy_step(every=every, keep_sublayers=keep, preserve_rng_state=False)
    assert torch.equal(other["loss 1"], expected["loss 1"])
    assert not torch.equal(other["0"], expected["0"])
