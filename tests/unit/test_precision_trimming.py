"""precision_trimming: on and off compute the same, site by site; switches; budgets of shapes."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn

from components.core.base import Target
from components.core.sizes import local_tokens
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.trimmed import SITES, trim
from components.precision_trimming import PrecisionTrimming
from components.titan.build import prepare
from components.titan.parts import module_class
from kernels import row_blocks
from kernels.combine import weighted_sum, weighted_sum_reference
from kernels.hyper_connections.mapping import project, project_reference
from kernels.hyper_connections.merge import merge, merge_reference
from kernels.hyper_connections.read import read, read_reference
from kernels.hyper_connections.sinkhorn import sinkhorn, sinkhorn_reference
from kernels.norms import (
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from kernels.precision import linear_accumulate, linear_accumulate_reference
from kernels.replay import replay
from kernels.swiglu import clamped_swiglu, clamped_swiglu_reference
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from launch.summary import memory_terms
from tests.unit.kernel_support import draw
from tests.unit.models_support import tiny_glm

SWITCH = "components.precision_trimming"
ON = f"{SWITCH}.enabled=true"
LOW, HIGH = "compute dtype", "float32"

T, N, D, K = 50, 4, 32, 3
PLACE = torch.randperm(T * K, generator=torch.Generator().manual_seed(9)).view(T, K)


def combined(sums: Callable, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return sums(rows, PLACE[: len(weights)], weights)


PAIRS: dict[str, tuple[Callable, Callable, list[tuple[str, tuple[int, ...]]], set[int]]] = {
    "project": (
        partial(project, eps=1e-5),
        partial(project_reference, eps=1e-5),
        [(LOW, (T, N * D)), (LOW, (24, N * D))],
        set(),
    ),
    "sinkhorn": (
        partial(sinkhorn, iterations=20, eps=1e-6),
        partial(sinkhorn_reference, iterations=20, eps=1e-6),
        [(HIGH, (5, 10, N, N))],
        set(),
    ),
    "read": (read, read_reference, [(LOW, (5, 10, N, D)), (HIGH, (5, 10, N))], {0, 1, 2}),
    "merge": (
        merge,
        merge_reference,
        [(LOW, (5, 10, N, D)), (LOW, (5, 10, D)), (HIGH, (5, 10, N)), (HIGH, (5, 10, N, N))],
        set(),
    ),
    "router": (
        linear_accumulate,
        linear_accumulate_reference,
        [(LOW, (T, D)), (LOW, (8, D))],
        set(),
    ),
    "rms_norm": (
        partial(rms_norm, eps=1e-5),
        partial(rms_norm_reference, eps=1e-5),
        [(LOW, (5, 10, D)), (LOW, (D,))],
        {0, 1, 2},
    ),
    "gated_rms_norm": (
        partial(gated_rms_norm, eps=1e-5),
        partial(gated_rms_norm_reference, eps=1e-5),
        [(LOW, (T, N, D)), (LOW, (T, N, D)), (LOW, (D,))],
        {0, 1, 2, 3},
    ),
    "expert_combine": (
        partial(combined, weighted_sum),
        partial(combined, weighted_sum_reference),
        [(LOW, (T * K, D)), (HIGH, (T, K))],
        {1},
    ),
    "swiglu": (
        partial(clamped_swiglu, limit=0.7),
        partial(clamped_swiglu_reference, limit=0.7),
        [(LOW, (5, 10, D)), (LOW, (5, 10, D))],
        {0, 1, 2},
    ),
}
"""Name -> the trimmed form, the plain one, dtypes and shapes of their inputs, and which of output
(0) and gradients (1 and up, in the order of the inputs) are equal to the bit."""


def inputs_of(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    high = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        draw(*shape, seed=seed).to(dtype if kind is LOW else high).requires_grad_()
        for seed, (kind, shape) in enumerate(PAIRS[name][2])
    ]


def results(form: Callable, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = form(*inputs)
    upstream = draw(*out.shape, seed=77).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_on_and_off_agree_as_documented(name, dtype):
    trimmed, plain, _, exact = PAIRS[name]
    inputs = inputs_of(name, dtype)
    # Sums of the same products, rounded once (trimmed) or at every step (plain, bfloat16).
    rtol, atol = (2e-2, 5e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    pairs = zip(results(trimmed, inputs), results(plain, inputs), strict=True)
    for index, (found, expected) in enumerate(pairs):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        if index in exact:
            assert torch.equal(found, expected), index
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", PAIRS)
def test_on_has_the_gradients_of_its_values(name, monkeypatch):
    # Several blocks of rows, the last one smaller.
    monkeypatch.setattr(row_blocks, "ELEMENTS", 20)
    shapes = [(kind, tuple(min(s, 3) for s in shape)) for kind, shape in PAIRS[name][2]]
    if name == "project":
        shapes = [(LOW, (3, 8)), (LOW, (8, 8))]
    if name == "expert_combine":
        # A permutation of all rows.
        place, sums = torch.tensor([[4, 1, 0], [3, 5, 2]]), weighted_sum
        form, shapes = (lambda r, w: sums(r, place, w)), [(LOW, (6, 3)), (HIGH, (2, 3))]
    else:
        form = PAIRS[name][0]
    inputs = [draw(*shape, seed=i).requires_grad_() for i, (_, shape) in enumerate(shapes)]
    assert torch.autograd.gradcheck(form, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "sinkhorn"])
def test_blocks_of_rows_change_nothing_but_sums_of_weights(name, dtype, monkeypatch):
    inputs = inputs_of(name, dtype)
    form = PAIRS[name][0]
    whole = results(form, inputs)
    monkeypatch.setattr(row_blocks, "ELEMENTS", 7 * N * D)
    cut = results(form, inputs)
    of_weights = [index + 1 for index, t in enumerate(inputs) if len(t) not in (5, T, T * K)]
    for index, (found, expected) in enumerate(zip(cut, whole, strict=True)):
        if index in of_weights:
            step = 1e-2 if dtype == torch.bfloat16 else 1e-6
            assert (found - expected).norm() <= step * expected.norm()
        elif name in ("project", "router"):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found, expected), index


def test_gradients_that_nobody_wants_are_not_computed():
    calls = []

    def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append((x.requires_grad, weight.requires_grad))
        return x * weight

    x, weight = draw(3, 4), draw(4).requires_grad_()
    replay(scaled, 1, (x,), (weight,)).sum().backward()
    assert calls[-1] == (False, True)
    torch.testing.assert_close(weight.grad, x.sum(0))


def test_gradients_of_shared_tensors_are_summed_in_float32_over_blocks(monkeypatch):
    """In bfloat16, 256 + 1 is 256 again: a thousand ones would not be counted."""
    monkeypatch.setattr(row_blocks, "ELEMENTS", 1)
    x = torch.ones(1000, 1, dtype=torch.bfloat16)
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    replay(torch.mul, 1, (x,), (weight,)).sum().backward()
    assert weight.grad.item() == 1000


@pytest.mark.parametrize("name", ["read", "rms_norm", "swiglu", "gated_rms_norm"])
def test_no_rows_are_no_special_case(name):
    inputs = [t[:0].detach().requires_grad_() if t.dim() > 1 else t for t in
              inputs_of(name, torch.bfloat16)]  # fmt: skip
    for found, expected in zip(*(results(f, inputs) for f in PAIRS[name][:2]), strict=True):
        assert torch.equal(found, expected)


# The whole model.


def build(dtype: torch.dtype, sites: tuple[str, ...]) -> nn.Module:
    config = tiny_glm().build_spec().model
    if sites:
        trim(config, *sites)
    model = config.build()
    torch.manual_seed(3)
    model.init_states()
    return model.to(dtype) if dtype == torch.float64 else model


def run(model: nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 320, (2, 150), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    logits.backward(torch.ones_like(logits) / logits.numel())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


# The router's products are the same calls in float32, where nothing is upcast.
@pytest.mark.parametrize("sites", [("rms_norm",), ("swiglu",), ("router",)], ids=str)
def test_norms_swiglu_and_router_change_no_bit_of_a_float32_model(sites):
    plain, trimmed = run(build(torch.float32, ())), run(build(torch.float32, sites))
    assert plain.keys() == trimmed.keys()
    assert all(torch.equal(plain[name], trimmed[name]) for name in plain)


@pytest.mark.parametrize("site", ["hyper_connections", "expert_combine"])
def test_other_sites_change_the_model_by_rounding(site):
    plain, trimmed = run(build(torch.float32, ())), run(build(torch.float32, (site,)))
    assert any(not torch.equal(plain[name], trimmed[name]) for name in plain)
    for name in plain:
        size = plain[name].norm()
        assert (plain[name] - trimmed[name]).norm() <= 1e-4 * size + 1e-9, name


def test_names_of_parameters_do_not_depend_on_it():
    plain, trimmed = build(torch.float32, ()), build(torch.float32, tuple(SITES))
    assert list(plain.state_dict()) == list(trimmed.state_dict())


# The component.


def parts(tmp_path: Any, *overrides: str) -> dict[str, str]:
    recipe = load_recipe(RECIPES / "quickstart.yaml", list(overrides)).recipe
    model = prepare(recipe, tmp_path, "cpu", 1).config.model_spec.model.layers[3]
    return {
        "hyper_connections": module_class(model.attention_hc).__name__,
        "rms_norm": module_class(model.attention_norm).__name__,
        "router": module_class(model.moe.router).__name__,
        "expert_combine": module_class(model.moe.routed_experts.token_dispatcher).__name__,
        "swiglu": module_class(model.moe.shared_experts.activation).__name__,
    }


def test_off_is_the_plain_model(tmp_path):
    found = parts(tmp_path, "components.precision_trimming.enabled=false")
    assert not any("Trimmed" in name for name in found.values())


@pytest.mark.parametrize("site", SITES)
def test_every_site_has_its_switch(site, tmp_path):
    found = parts(tmp_path, ON, f"components.precision_trimming.{site}=false")
    assert {name for name, kind in found.items() if "Trimmed" not in kind} == {site}


def problems(*overrides: str, recipe: str = "quickstart") -> list[str]:
    loaded = load_recipe(RECIPES / f"{recipe}.yaml", []).recipe
    settings = loaded.components.precision_trimming
    for override in overrides:
        name, value = override.split("=")
        if name == "dense":
            loaded.model.n_experts = None
        else:
            setattr(settings, name, value == "true")
    component = PrecisionTrimming(settings)
    return [str(problem) for problem in component.check(loaded, Target("cpu", 1))]


def test_all_sites_off_is_refused():
    (found,) = problems(*(f"{site}=false" for site in SITES))
    assert "saves nothing" in found and "hyper_connections" in found


def test_sites_of_experts_are_refused_without_experts():
    found = problems("dense=true", "router=true", "expert_combine=true", "swiglu=true")
    assert len(found) == 2 and "router" in found[0] and "expert_combine" in found[1]
    assert problems("dense=true") == problems() == []


def test_a_switch_that_finds_nothing_is_an_error(tmp_path):
    recipe = load_recipe(RECIPES / "quickstart.yaml", [ON, f"{SWITCH}.router=true"]).recipe
    recipe.model.n_experts, recipe.model.n_dense_layers = None, recipe.model.n_layers
    with pytest.raises(ValueError, match=r"precision_trimming\.router replaces no part.*false"):
        prepare(recipe, tmp_path, "cpu", 1)


# Figures of `make check`.


def test_check_reports_working_set_with_recomputation_and_all_activations_without():
    target = Target("cuda", 64, 139 * 2**30)
    sizes = {}
    for trimming in ("false", "true"):
        for recompute in ("false", "true"):
            overrides = [
                f"components.precision_trimming.enabled={trimming}",
                f"components.full_recompute.enabled={recompute}",
                # Its kernels keep what trimming does, whether it is on or off.
                "model.hyper_connections_kernel=torch",
            ]
            recipe = load_recipe(RECIPES / "glm_flash_128k_64xh200.yaml", overrides).recipe
            for field in fields(recipe.components):
                if field.name not in ("precision_trimming", "full_recompute", "ring_dtp"):
                    getattr(recipe.components, field.name).enabled = False
            terms = {t.name: t.nbytes for t in memory_terms(recipe, target)}
            whole = [size for name, size in terms.items() if "inside all layers" in name]
            one = [size for name, size in terms.items() if "working set" in name]
            sizes[trimming, recompute] = (whole or one)[0]
            assert len(whole) + len(one) == 1
    assert sizes["true", "true"] < sizes["false", "true"] < sizes["true", "false"]
    assert sizes["true", "false"] < 0.5 * sizes["false", "false"]


def test_models_that_do_not_say_have_no_estimate():
    recipe = load_recipe(RECIPES / "moe_120b_128k_16xh200.yaml", []).recipe
    assert recipe.model.layer_working_set_bytes(recipe) is None
    assert recipe.model.layer_saved_bytes(recipe) is None
    state = memory_terms(recipe, Target("cuda", 16))[0]
    assert state.note.startswith("activations inside layers, buffers")


def test_check_reports_logits_where_they_are_larger_than_what_layers_need():
    recipe = load_recipe(RECIPES / "glm_flash_128k_64xh200.yaml", []).recipe
    target = Target("cuda", 64)
    assert not any("logits" in term.name for term in memory_terms(recipe, target))
    recipe.components.ring_dtp.enabled = False
    terms = {term.name: term.nbytes for term in memory_terms(recipe, target)}
    (whole,) = [size for name, size in terms.items() if "logits" in name]
    assert whole == local_tokens(recipe) * 154_880 * 10
    assert not any("working set" in name for name in terms)


def test_a_trimmed_layer_keeps_documents_apart():
    model = build(torch.float32, tuple(SITES))
    layer = next(iter(model.layers.values()))
    streams = torch.randn(1, 12, 4, 128)
    packed = layer(streams, Documents.from_lengths((5, 7)))
    alone = layer(streams[:, 5:], Documents.from_lengths((7,)))
    torch.testing.assert_close(packed[:, 5:], alone, rtol=1e-5, atol=1e-5)
