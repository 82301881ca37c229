"""What a token may depend on: nothing of other documents, and nothing after itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from components.models.glm_flash.documents import Documents
from tests.glm_flash.oracle import build_reference
from tests.glm_flash.support import (
    build_native,
    draw_tokens,
    relative_error,
    restarting_positions,
)

# Documents around the one that is watched; none is a multiple of the pool of 4 or of a KDA chunk.
LENGTHS = (37, 70, 23)
WATCHED = slice(37, 107)
TOTAL = sum(LENGTHS)

# Changes of the oracle's configuration.
DENSE = {"mlp_layer_types": ["dense"] * 4}
# Experts with as many tokens each, whatever the tokens: a matrix product over another number of
# rows may sum in another order, and then no result is the same to the last bit.
ALL_EXPERTS = {"num_experts_per_tok": 8}


def native_model(**changes: Any) -> nn.Module:
    """The oracle's tiny model: 2 pools of 4 tokens per query, 2 of 8 experts per token."""
    dense = "sparse" not in changes.get("mlp_layer_types", ["sparse"])
    reference = build_reference(1, **changes)
    return build_native(reference, trimmed=True, **({"n_experts": None} if dense else {}))


def permuted_outside(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Rows of the first and the last document shuffled, each within itself; the watched stay."""
    generator = torch.Generator().manual_seed(seed)
    shuffled, end = values.clone(), 0
    for length in LENGTHS:
        begin, end = end, end + length
        if begin != WATCHED.start:
            order = torch.randperm(length, generator=generator)
            shuffled[begin:end] = values[begin:end][order]
    return shuffled


def assert_same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, or as near as float32 allows for the model that is not in EXACT."""
    if name in EXACT:
        assert torch.equal(actual, expected)
    else:
        assert relative_error(actual, expected) < 1e-5


Run = Callable[[torch.Tensor], torch.Tensor]


def output_and_gradient(run: Run, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``run(x)`` (T, width), and the gradient in x of its product with fixed numbers."""
    x = x.clone().requires_grad_()
    out = run(x)
    generator = torch.Generator().manual_seed(3)
    out.backward(torch.randn(out.shape, generator=generator))
    assert x.grad is not None
    return out.detach(), x.grad


def mixer_run(kind: str, lengths: tuple[int, ...] = LENGTHS) -> Run:
    """One mixer of the tiny model on one row of packed documents."""
    layer = {"kda": "1", "dsa": "3"}[kind]
    mixer = native_model().layers[layer].attention
    documents = Documents.from_lengths(lengths)
    return lambda x: mixer(x.unsqueeze(0), documents).squeeze(0)


def model_run(lengths: tuple[int, ...] = LENGTHS, **changes: Any) -> Run:
    """The whole model on one row, from embeddings (T, dim) to logits."""
    native = native_model(**changes)
    positions = restarting_positions(lengths)
    tokens = torch.zeros_like(positions)

    def run(x: torch.Tensor) -> torch.Tensor:
        native.tok_embeddings.forward = lambda tokens: x.unsqueeze(0)
        return native(tokens, positions=positions).squeeze(0)

    return run


RUNS: dict[str, Callable[..., Run]] = {
    "kda": partial(mixer_run, "kda"),
    "dsa": partial(mixer_run, "dsa"),
    "dense_model": partial(model_run, **DENSE),
    "model_of_all_experts": partial(model_run, **ALL_EXPERTS),
    "model": model_run,
}


# Those whose matrix products have the same numbers of rows, whatever the inputs.
EXACT = [name for name in RUNS if name != "model"]


def inputs(seed: int = 0, total: int = TOTAL) -> torch.Tensor:
    return torch.randn(total, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("seed", [0, 1])
def test_permuting_other_documents_changes_nothing(name: str, seed: int) -> None:
    run, x = RUNS[name](), inputs(seed)
    moved = permuted_outside(x, seed)
    out, grad = output_and_gradient(run, x)
    out_moved, grad_moved = output_and_gradient(run, moved)
    assert_same(name, out[WATCHED], out_moved[WATCHED])
    assert_same(name, grad[WATCHED], grad_moved[WATCHED])
    # The others did change, so there was something to leak.
    assert relative_error(out[: WATCHED.start], out_moved[: WATCHED.start]) > 0.1
    assert relative_error(out[WATCHED.stop :], out_moved[WATCHED.stop :]) > 0.1


@pytest.mark.parametrize("name", RUNS)
def test_no_gradient_crosses_a_border(name: str) -> None:
    run, x = RUNS[name](), inputs().requires_grad_()
    run(x)[WATCHED].square().sum().backward()
    assert x.grad is not None
    assert not x.grad[: WATCHED.start].any()
    assert not x.grad[WATCHED.stop :].any()
    assert x.grad[WATCHED].any(dim=1).all()


# Around the edges of pools (4) and of KDA's chunks (64).
CUTS = (0, 2, 3, 4, 15, 16, 37, 62, 63, 64, 65, 99)


@pytest.mark.parametrize("name", RUNS)
def test_later_tokens_change_nothing(name: str) -> None:
    total = 101
    run, x, other = RUNS[name]((total,)), inputs(0, total), inputs(1, total)
    with torch.no_grad():
        out = run(x)
        for cut in CUTS:
            changed = run(torch.cat([x[: cut + 1], other[cut + 1 :]]))
            assert_same(name, changed[: cut + 1], out[: cut + 1])
            assert relative_error(changed[cut + 1 :], out[cut + 1 :]) > 0.1


@pytest.mark.parametrize("name", RUNS)
def test_no_gradient_flows_back_from_earlier_tokens(name: str) -> None:
    total = 101
    run, x = RUNS[name]((total,)), inputs(0, total).requires_grad_()
    out = run(x)
    for cut in CUTS:
        (grad,) = torch.autograd.grad(out[: cut + 1].square().sum(), x, retain_graph=True)
        assert not grad[cut + 1 :].any(), cut
        # The token itself counts, but for the sparse mixer, where its pool may not be chosen.
        assert grad[cut].any() or name == "dsa"


@pytest.mark.parametrize("name", RUNS)
def test_a_prefix_alone_gives_the_same(name: str) -> None:
    total = 101
    x = inputs(0, total)
    with torch.no_grad():
        out = RUNS[name]((total,))(x)
        for cut in CUTS:
            alone = RUNS[name]((cut + 1,))(x[: cut + 1])
            # Another number of rows may take another path through a matrix product.
            torch.testing.assert_close(alone, out[: cut + 1], rtol=1e-4, atol=1e-5)


def gradients(native: nn.Module) -> dict[str, torch.Tensor]:
    """Of a cross entropy over packed documents, by name."""
    tokens, positions = draw_tokens(TOTAL, 1).unsqueeze(0), restarting_positions(LENGTHS)
    logits = native(tokens, positions=positions)
    nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
    return {name: p.grad for name, p in native.named_parameters() if p.grad is not None}


def test_recomputing_layers_in_backward_gives_the_same_bits() -> None:
    expected = gradients(native_model())
    native, runs = native_model(), []
    for layer in native.layers.values():
        forward = layer.forward

        def counted(*args: object, forward: Run = forward) -> torch.Tensor:
            runs.append(1)
            return forward(*args)

        layer.forward = partial(checkpoint, counted, use_reentrant=False)
    actual = gradients(native)
    assert len(runs) == 2 * len(native.layers)
    assert actual.keys() == expected.keys()
    assert [name for name, grad in expected.items() if not torch.equal(actual[name], grad)] == []
