"""Routed experts in chunks against the same experts whole, on one rank."""

import gc
import weakref
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from components.expert_dispatch.experts import ChunkedRoutedExperts, chunked_experts
from components.recompute.layer import RecomputedLayer
from tests.unit.experts_support import (
    DIM,
    FAMILIES,
    TOP_K,
    build,
    config_of,
    gradients,
    in_chunks,
    routing,
    rows,
    run,
)

MEMBERSHIPS = ("strided", "contiguous")
ROUNDING = {torch.float64: 1e-12, torch.bfloat16: 4e-3}
"""Largest error of a parameter's gradient, relative. Chunks' gradients are rounded to the dtype
before they are summed."""


def assert_as_whole(
    family: str,
    dtype: torch.dtype,
    chunked: ChunkedRoutedExperts,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    x = rows(len(ids), 1, dtype)
    expected, wanted = gradients(build(config_of(family), dtype), x, weights, ids)
    out, found = gradients(chunked, x, weights, ids)
    assert out.dtype == dtype and found.keys() == wanted.keys()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in wanted.items():
        assert gradient is not None and found[name] is not None, name
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        # Tokens and weights are one chunk's each: nothing is summed in another order.
        limit = ROUNDING[dtype] if name.startswith("inner_experts") else 1e-12
        assert error <= limit, f"{name}: {error:.2e}"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("glm", torch.float64), ("glm", torch.bfloat16), ("moe", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("membership", MEMBERSHIPS)
def test_outputs_and_every_gradient_are_those_of_the_whole(
    family: str, dtype: torch.dtype, membership: str
) -> None:
    for (tokens, chunk), duplicates in product([(37, 10), (64, 1), (5, 4)], (False, True)):
        chunked = in_chunks(family, chunk, dtype, membership=membership)
        weights, ids = routing(tokens, duplicates=duplicates)
        assert_as_whole(family, dtype, chunked, weights, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_chunk_is_the_whole_to_the_bit(family: str) -> None:
    weights, ids = routing(21)
    x = rows(21, 1, torch.bfloat16)
    expected, wanted = gradients(build(config_of(family), torch.bfloat16), x, weights, ids)
    out, found = gradients(in_chunks(family, 21, torch.bfloat16), x, weights, ids)
    assert torch.equal(out, expected)
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


def test_all_tokens_may_go_to_one_expert() -> None:
    weights, _ = routing(30)
    ids = torch.full((30, TOP_K), 5)
    assert_as_whole("glm", torch.float64, in_chunks("glm", 8), weights, ids)


def test_experts_that_no_token_visits_get_zero_gradients() -> None:
    weights, ids = routing(30, experts=TOP_K)
    _, found = gradients(in_chunks("glm", 8), rows(30, 1), weights, ids)
    for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
        gradient = found[f"inner_experts.{name}"]
        assert gradient[:TOP_K].any() and not gradient[TOP_K:].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_at_all_runs_forward_and_backward(family: str) -> None:
    weights, ids = routing(0)
    out, found = gradients(in_chunks(family, 8, torch.bfloat16), rows(0, 1, torch.bfloat16),
                           weights, ids)  # fmt: skip
    assert out.shape == (0, DIM) and found["x"].shape == (0, DIM)
    assert all(not g.any() for name, g in found.items() if name.startswith("inner_experts"))


class Watched:
    """Replaces ``_routed``: tokens of each call, and what is alive of earlier calls' graphs."""

    def __init__(self, experts: ChunkedRoutedExperts) -> None:
        self.tokens: list[int] = []
        self.alive: list[int] = []
        self._run: Callable = experts._routed
        self._outputs: list[weakref.ref] = []
        experts._routed = self

    def __call__(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        self.alive.append(sum(output() is not None for output in self._outputs))
        out = self._run(x, *routing)
        if torch.is_grad_enabled():
            self._outputs.append(weakref.ref(out))
        self.tokens.append(len(x))
        return out


@pytest.mark.parametrize(
    ("membership", "expected"), [("strided", [10, 9, 9, 9]), ("contiguous", [10, 10, 10, 7])]
)
def test_every_chunk_runs_twice_and_its_graph_is_gone_before_the_next(
    membership: str, expected: list[int]
) -> None:
    experts = in_chunks("glm", 10, membership=membership)
    watched = Watched(experts)
    gc.disable()
    try:
        gradients(experts, rows(37, 1), *routing(37))
    finally:
        gc.enable()
    assert watched.tokens == [*expected, *expected]
    assert watched.alive == [0] * 8


def test_chunks_grow_where_their_number_is_bounded() -> None:
    experts = in_chunks("glm", 2, max_chunks=3)
    watched = Watched(experts)
    with torch.no_grad():
        run(experts, rows(30, 1), *routing(30))
    assert watched.tokens == [10, 10, 10]


def test_a_recomputed_layer_runs_every_chunk_no_third_time() -> None:
    weights, ids = routing(37)
    expected, wanted = gradients(build(config_of("glm")), rows(37, 1), weights, ids)
    experts = in_chunks("glm", 10)
    watched = Watched(experts)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return run(experts, x, weights, ids)

    x = rows(37, 1).requires_grad_()
    out = RecomputedLayer(Layer())(x)
    out.backward(rows(37, 7))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, wanted["x"], rtol=1e-12, atol=1e-12)
    assert len(watched.tokens) == 2 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_kept_but_tokens_weights_and_ids(family: str) -> None:
    experts = in_chunks(family, 10, torch.bfloat16)
    x, (weights, ids) = rows(37, 1, torch.bfloat16), routing(37)
    leaves = x.requires_grad_(), weights.requires_grad_()
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run(experts, *leaves, ids)
    assert out.requires_grad
    sizes = sorted(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert sizes == sorted([37 * DIM * 2, 37 * TOP_K * 4, 37 * TOP_K * 8])


@pytest.mark.parametrize("frozen", ["experts", "x", "weights", "x and weights", "all but w1"])
def test_what_is_frozen_gets_no_gradient_and_changes_none(frozen: str) -> None:
    weights, ids = routing(37)
    _, wanted = gradients(build(config_of("glm")), rows(37, 1), weights, ids)
    experts = in_chunks("glm", 10)
    names = {"experts": "123", "all but w1": "23"}.get(frozen, "")
    for name, parameter in experts.inner_experts.named_parameters():
        parameter.requires_grad_(name[1] not in names)
    x = rows(37, 1).requires_grad_(frozen not in ("x", "x and weights", "all but w1"))
    weights.requires_grad_("weights" not in frozen and frozen != "all but w1")
    run(experts, x, weights, ids).backward(rows(37, 7))
    found = {"x": x.grad, "weights": weights.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    got = {name for name, gradient in found.items() if gradient is not None}
    none = {
        "experts": {name for name in wanted if name.startswith("inner_experts")},
        "x": {"x"}, "weights": {"weights"}, "x and weights": {"x", "weights"},
        "all but w1": set(wanted) - {"inner_experts.w1_EFD"},
    }[frozen]  # fmt: skip
    assert got == set(wanted) - none
    for name in got:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-12)


def test_many_chunks_add_up_without_losing_small_gradients() -> None:
    """512 equal chunks: a sum in bfloat16 would stop growing at 256 times its last bit."""
    experts = in_chunks("glm", 1, torch.bfloat16, max_chunks=600)
    x = rows(1, 1, torch.bfloat16).expand(512, DIM).contiguous()
    weights, ids = torch.ones(512, TOP_K), torch.arange(TOP_K).expand(512, TOP_K).contiguous()
    pull = rows(1, 7, torch.bfloat16)
    run(experts, x, weights, ids).backward(pull.expand(512, DIM))
    many = [parameter.grad.float() for parameter in experts.parameters()]
    experts.zero_grad(set_to_none=True)
    run(experts, x[:1], weights[:1], ids[:1]).backward(pull)
    for total, parameter in zip(many, experts.parameters(), strict=True):
        assert torch.equal(total[:TOP_K], 512 * parameter.grad.float()[:TOP_K])


def test_the_config_keeps_experts_and_dispatcher_as_they_were() -> None:
    whole = config_of("glm")
    chunked = chunked_experts(whole, chunk_tokens=10, max_chunks=64, membership="strided")
    assert chunked.inner_experts == whole.inner_experts
    assert chunked.token_dispatcher == whole.token_dispatcher
    assert chunked.sharding_config == whole.sharding_config
