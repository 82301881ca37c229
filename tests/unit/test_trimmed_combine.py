"""torchtitan's combine without its float32 copy: the same sums, gradients, and what is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
    TorchAOTokenDispatcher,
)

from components.core.base import Target
from components.precision_trimming import PrecisionTrimming
from components.titan.build import prepare
from components.titan.combine import combine_at_home, keep_outputs
from components.titan.moe import RoundedDispatcher
from components.titan.parts import module_class
from kernels import row_blocks
from kernels.combine import rounded_sum, weighted_sum
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from tests.swaps import swap_parts
from tests.training import small_overrides, train, write_corpus
from tests.unit.recompute_support import build, step
from tests.unit.test_sublayer_chunking import first_gradients

ON = "components.precision_trimming.enabled=true"
WIDTH, EXPERTS = 64, 8
SHAPES = [(50, 1), (50, 2), (300, 8), (0, 2)]
"""Tokens, experts of each."""


def dispatchers(top_k: int) -> tuple[LocalTokenDispatcher, LocalTokenDispatcher]:
    """torchtitan's own, and the one that keeps no copy."""
    config = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=top_k)
    return config.build(), keep_outputs(config).build()


def given(tokens: int, top_k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tokens, scores, expert ids, outputs of the experts in the order of experts."""
    draw = torch.Generator().manual_seed(tokens + top_k)
    x = torch.randn(tokens, WIDTH, generator=draw).to(dtype)
    ids = torch.rand(tokens, EXPERTS, generator=draw).topk(top_k).indices
    outputs = torch.randn(tokens * top_k, WIDTH, generator=draw).to(dtype)
    return x, torch.rand(tokens, top_k, generator=draw), ids, outputs


def combined(dispatcher: Any, x: Any, scores: Any, ids: Any, outputs: Any) -> torch.Tensor:
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    metadata = dispatcher.dispatch(x, scores, ids, counts)[2]
    return dispatcher.combine(outputs, metadata, x)


def results(dispatcher: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The sums, and gradients of outputs and scores."""
    x, scores, ids, outputs = inputs
    scores, outputs = scores.clone().requires_grad_(), outputs.clone().requires_grad_()
    out = combined(dispatcher, x, scores, ids, outputs)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [outputs, scores], pull)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_and_gradients_of_outputs_are_torchtitans_to_the_bit(shape, dtype, monkeypatch):
    stock, trimmed = dispatchers(shape[1])
    inputs = given(*shape, dtype)
    expected = results(stock, *inputs)
    for elements in (row_blocks.ELEMENTS, 7 * WIDTH):
        monkeypatch.setattr(row_blocks, "ELEMENTS", elements)
        found = results(trimmed, *inputs)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert found[0].dtype == found[1].dtype == dtype
        torch.testing.assert_close(found[2], expected[2], rtol=1e-5, atol=1e-5)


def test_products_are_rounded_and_partial_sums_are_not():
    place = torch.tensor([[0, 1, 2]])
    rows = torch.tensor([[1.0], [2**-8], [2**-8]]).bfloat16()
    # 1 + 2^-8 is 1 in bfloat16.
    assert rounded_sum(rows, place, torch.ones(1, 3)).item() == 1 + 2**-7
    # 3 x (1 + 2^-8) is not 3 in bfloat16.
    weights = torch.full((1, 3), 1 + 2**-8)
    assert rounded_sum(torch.ones(3, 1).bfloat16(), place, weights).item() == 3
    assert weighted_sum(torch.ones(3, 1).bfloat16(), place, weights).item() == 3 + 2**-6


def test_it_has_the_gradients_of_its_values():
    place = torch.tensor([[4, 1, 0], [3, 5, 2]])
    draw = torch.Generator().manual_seed(0)
    shapes = (6, 3), (2, 3)
    inputs = [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(lambda r, w: rounded_sum(r, place, w), inputs)


@pytest.mark.parametrize("trimmed", [False, True])
def test_two_bytes_per_number_are_kept_instead_of_four(trimmed):
    tokens, top_k = 300, 8
    x, scores, ids, outputs = given(tokens, top_k, torch.bfloat16)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    leaves = scores.requires_grad_(), ids, outputs.requires_grad_()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        combined(dispatchers(top_k)[trimmed], x, *leaves)
    routes = tokens * top_k
    # Besides: places or tokens of routes, scores sorted by expert and by token, and the order that
    # scores were sorted by.
    few = routes * (8 + 4 + 8)
    assert saved.pop(outputs.data_ptr(), 0) == (2 * routes * WIDTH if trimmed else 0)
    copies = [size for size in saved.values() if size >= 2 * routes * WIDTH]
    assert copies == ([] if trimmed else [4 * routes * WIDTH])
    assert sum(saved.values()) - sum(copies) <= few


def test_outputs_that_come_home_by_other_ways_are_summed_by_the_same_function():
    for dispatcher in dispatchers(2):
        x, scores, ids, outputs = given(50, 2, torch.bfloat16)
        expected, out = combined(dispatcher, x, scores, ids, outputs), torch.empty_like(x)
        order = ids.flatten().argsort(stable=True)
        place = order.argsort().view(50, 2)
        ascending = ids.argsort(1)
        combine_at_home(
            dispatcher, outputs, place.gather(1, ascending), scores.gather(1, ascending), out
        )
        assert torch.equal(out, expected)


def test_dispatchers_that_sum_in_a_way_of_their_own_are_refused():
    config = TorchAOTokenDispatcher.Config(num_experts=4, top_k=2, pad_multiple=16)
    with pytest.raises(ValueError, match="TorchAOTokenDispatcher, which combines rows in a way"):
        keep_outputs(config)


# The component.


@pytest.mark.parametrize("model", ["moe_debug", "gpt_oss_20b"])
@pytest.mark.parametrize("enabled", [False, True])
def test_the_switch_replaces_the_dispatchers_of_torchtitans_models(model, enabled, tmp_path):
    overrides = [f"model={model}", f"components.precision_trimming.enabled={enabled}"]
    if model == "gpt_oss_20b":
        overrides.append("training.mixed_precision_param=bfloat16")
    recipe = load_recipe(RECIPES / "quickstart.yaml", overrides).recipe
    decoder = prepare(recipe, tmp_path, "cpu", 1).config.model_spec.model
    kinds = {
        issubclass(module_class(layer.moe.routed_experts.token_dispatcher), RoundedDispatcher)
        for layer in decoder.layers
    }
    assert kinds == {enabled}


def problems(recipe: str, *overrides: str) -> list[str]:
    loaded = load_recipe(RECIPES / f"{recipe}.yaml", [ON, *overrides]).recipe
    component = PrecisionTrimming(loaded.components.precision_trimming)
    return [str(problem) for problem in component.check(loaded, Target("cuda", 16))]


def test_with_defaults_a_model_of_torchtitans_layers_uses_its_one_site():
    assert problems("moe_debug_2rank") == []


def test_every_site_that_a_model_lacks_is_refused_by_name():
    lacking = ("hyper_connections", "router", "rms_norm", "swiglu")
    asked = [f"components.precision_trimming.{site}=true" for site in lacking]
    found = problems("moe_debug_2rank", *asked)
    assert len(found) == len(lacking)
    for site, problem in zip(lacking, found, strict=True):
        assert problem.startswith(f"components.precision_trimming.{site}: true finds nothing")


NO_SITES = {
    "other kernels": (["model.comm_backend=deepep"], "model.comm_backend 'deepep' sums in kernels"),
    "planned": (["components.pipelined_llep.enabled=true"], "pipelined_llep keeps nothing of the"),
    "dense": (["model=llama3_debug"], "every layer of the model is dense"),
}


@pytest.mark.parametrize("name", NO_SITES)
def test_where_nothing_sums_as_torchtitan_does_there_is_no_site(name):
    overrides, says = NO_SITES[name]
    (found,) = problems("moe_debug_2rank", *overrides)
    assert found.startswith("components.precision_trimming.enabled: true needs") and says in found


@pytest.mark.parametrize("name", ["moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_bfloat16_model_computes_the_same_bits_and_gradients_within_rounding(name):
    def keep_all(decoder: Any) -> None:
        swap_parts(decoder, AllToAllTokenDispatcher.Config, keep_outputs)

    plain, trimmed = (step(build(name, change).to(torch.bfloat16)) for change in (None, keep_all))
    assert torch.equal(trimmed["loss 0"], plain["loss 0"])
    assert plain.keys() == trimmed.keys()
    for key, gradient in plain.items():
        assert (trimmed[key] - gradient).norm() <= 1e-2 * gradient.norm(), key


def test_training_learns_the_same_with_and_without(tmp_path: Path):
    corpus = write_corpus(tmp_path / "corpus")
    small = [o for o in small_overrides(corpus) if not o.startswith("components.precision")]
    steps = ["training.steps=2", "components.layer_recompute.enabled=true"]
    runs = []
    for on in (False, True):
        switch = f"components.precision_trimming.enabled={on}"
        runs.append(train(tmp_path / str(on), [*small, *steps, switch], use=first_gradients))
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])
