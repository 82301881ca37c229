"""Each part of GLM-5.3-Flash in bfloat16: as near to float32's result as transformers comes.

Parts are compared one by one on given inputs. Over the whole model a rounded score chooses another
expert or pool sooner or later, and from there on two right implementations differ.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn

from components.models.glm_flash.documents import Documents
from tests.glm_flash.oracle import Reference, build_reference, grads_of
from tests.glm_flash.support import build_native, captured, pools_of_tokens, relative_error

TOKENS = 130
DOCUMENTS = Documents.from_lengths((TOKENS,))
NO_PADDING = torch.ones(1, TOKENS, dtype=torch.bool)

# What both models keep in float32, by what their names contain.
REFERENCE_FLOAT32 = ("e_score_correction_bias", "conv1d", "dt_bias", "A_log", "hc.base", "hc.scale")
NATIVE_FLOAT32 = ("expert_bias", "_conv.", "dt_bias", "A_log", "affine.base", "affine.scale")

# A gradient that is rounded once is off by about 2^-9 / sqrt(3).
ONE_ROUNDING = 2**-10


@dataclass
class Part:
    """One part of both models.

    Attributes:
        shape: of its input for one token.
        reference, native: run it in a model on an input (1, TOKENS, ...).
        hollow: layer in which identities take the place of mixer and experts, if any.
        same_bits: share of the output's numbers that must equal transformers' to the bit. Below 1
            because sums of another order may end on the other side of a rounding; a rounding that
            is left out, or done elsewhere, leaves no more than three quarters.
    """

    shape: tuple[int, ...]
    reference: Callable[[Any, torch.Tensor], torch.Tensor]
    native: Callable[[Any, torch.Tensor], torch.Tensor]
    hollow: str | None = None
    same_bits: float = 0.95


PARTS = {
    "kda": Part(
        (64,),
        lambda m, x: m.model.layers[1].self_attn(hidden_states=x),
        lambda m, x: m.layers["1"].attention(x, DOCUMENTS),
    ),
    # Not the same bits: the maps to keys and values are applied to queries and outputs here.
    "dsa": Part(
        (64,),
        lambda m, x: m.model.layers[3].self_attn(hidden_states=x, attention_mask=NO_PADDING)[0],
        lambda m, x: m.layers["3"].attention(x, DOCUMENTS),
        same_bits=0.0,
    ),
    "dense_mlp": Part(
        (64,), lambda m, x: m.model.layers[0].mlp(x), lambda m, x: m.layers["0"].feed_forward(x)
    ),
    "moe": Part((64,), lambda m, x: m.model.layers[2].mlp(x), lambda m, x: m.layers["2"].moe(x)),
    "norm": Part((64,), lambda m, x: m.model.norm(x), lambda m, x: m.norm(x)),
    "hyper_connections": Part(
        (4, 64),
        lambda m, x: m.model.layers[1](x, attention_mask=NO_PADDING)[0],
        lambda m, x: m.layers["1"](x, DOCUMENTS),
        hollow="1",
    ),
    "dense_layer": Part(
        (4, 64),
        lambda m, x: m.model.layers[0](x, attention_mask=NO_PADDING)[0],
        lambda m, x: m.layers["0"](x, DOCUMENTS),
        same_bits=0.9,
    ),
    "end": Part(
        (4, 64),
        lambda m, x: m.lm_head(m.model.norm(m.model.hc_head(x))),
        lambda m, x: m.lm_head(m.norm(x.mean(2))),
    ),
}


def in_bfloat16(model: nn.Module, keep: tuple[str, ...]) -> Any:
    """A copy with every parameter in bfloat16 but those whose name contains one of ``keep``."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if not any(part in name for part in keep):
            parameter.data = parameter.data.bfloat16()
    return model


def rounded_reference(seed: int) -> Reference:
    """The oracle in float32 with values that bfloat16 holds, so that only arithmetic differs."""
    reference = build_reference(seed)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if not any(part in name for part in REFERENCE_FLOAT32):
                parameter.copy_(parameter.bfloat16())
    return reference


def teach_selection(exact: Reference, models: list[Any], x: torch.Tensor) -> None:
    """Make every sparse mixer of ``models`` attend to what the exact one chooses for ``x``."""
    indexer = exact.model.layers[3].self_attn
    with torch.no_grad(), captured(exact, lambda name, _: name.endswith(".indexer")) as indices:
        indexer(hidden_states=x.float(), attention_mask=NO_PADDING)
    tokens = indices[0]
    pools = as_ids(pools_of_tokens(tokens[0], 4))
    for model in models:
        if isinstance(model, Reference):
            model.model.layers[3].self_attn.indexer.forward = lambda **unused: tokens
        else:
            model.layers["3"].attention.indexer.forward = lambda *unused: pools


def as_ids(chosen: torch.Tensor) -> torch.Tensor:
    """int32 (queries, most chosen) of bool (queries, pools), filled up with -1."""
    ids = torch.where(chosen, torch.arange(chosen.shape[1]), -1)
    return ids.sort(1, descending=True).values[:, : int(chosen.sum(1).max())].int()


def hollow_out(layer: str, model: Any) -> None:
    """Leave of a layer what surrounds its mixer and its feed-forward part."""
    if isinstance(model, Reference):
        block = model.model.layers[int(layer)]
        block.self_attn.forward = lambda hidden_states, **unused: hidden_states
        block.mlp.forward = lambda x: x
    else:
        block = model.layers[layer]
        block.attention.forward = lambda x, documents: x
        block.moe.forward = lambda x, padding: x


def run(model: Any, part: Part, x: torch.Tensor, cotangent: torch.Tensor) -> dict[str, Any]:
    """Output, gradient of the input and of every parameter (by native name) of one part."""
    x = x.clone().requires_grad_()
    if isinstance(model, Reference):
        out = part.reference(model, x)
        out.backward(cotangent.to(x.dtype))
        found = grads_of(model)
    else:
        out = part.native(model, x)
        out.backward(cotangent.to(x.dtype))
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"input": x.grad, "output": out.detach()}


@pytest.mark.parametrize("trimmed", [False, True], ids=["plain", "trimmed"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_a_part_is_as_exact_as_transformers_is(part: Part, seed: int, trimmed: bool) -> None:
    exact = rounded_reference(seed)
    theirs = in_bfloat16(exact, REFERENCE_FLOAT32)
    ours = in_bfloat16(build_native(exact, trimmed), NATIVE_FLOAT32)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, TOKENS, *part.shape, generator=generator).bfloat16()
    shape = (97,) if part is PARTS["end"] else part.shape
    cotangent = torch.randn(1, TOKENS, *shape, generator=generator).bfloat16()
    if part is PARTS["dsa"]:
        teach_selection(exact, [exact, theirs, ours], x)
    if part.hollow is not None:
        for model in (exact, theirs, ours):
            hollow_out(part.hollow, model)

    right = run(exact, part, x.float(), cotangent)
    expected, actual = run(theirs, part, x, cotangent), run(ours, part, x, cotangent)

    assert actual.keys() == expected.keys()
    assert {name: value.dtype for name, value in actual.items()} == {
        name: value.dtype for name, value in expected.items()
    }
    for name, value in right.items():
        # Errors of a few numbers scatter; those of many average out.
        factor = 1.5 if value.numel() >= 32 else 3
        limit = factor * relative_error(expected[name], value) + ONE_ROUNDING
        assert relative_error(actual[name], value) <= limit, name
    same = (actual["output"] == expected["output"]).float().mean().item()
    assert same >= part.same_bits


def test_the_indexer_chooses_as_well_as_that_of_transformers() -> None:
    """Rounding changes some choices; no more of them here than there."""
    wrong = {"theirs": 0, "ours": 0}
    for seed in range(4):
        exact = rounded_reference(seed)
        theirs = in_bfloat16(exact, REFERENCE_FLOAT32)
        ours = in_bfloat16(build_native(exact), NATIVE_FLOAT32)
        x = torch.randn(1, TOKENS, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        right = chosen(exact, x.float())
        wrong["theirs"] += int((chosen(theirs, x) != right).sum())
        wrong["ours"] += int((chosen(ours, x) != right).sum())
    assert 0 < wrong["ours"] <= 1.5 * wrong["theirs"]


def chosen(model: Any, x: torch.Tensor) -> torch.Tensor:
    """bool (TOKENS, pools): what the sparse mixer's indexer chooses."""
    part = PARTS["dsa"]
    run_part = part.reference if isinstance(model, Reference) else part.native
    with torch.no_grad(), captured(model, lambda name, _: name.endswith(".indexer")) as indices:
        run_part(model, x)
    if isinstance(model, Reference):
        return pools_of_tokens(indices[0][0], 4)
    return nn.functional.one_hot(indices[0].long() + 1, TOKENS // 4 + 1)[..., 1:].any(1)
