"""GLM-5.3-Flash against transformers: outputs, every gradient, every chosen pool."""

from itertools import product
from typing import Any

import pytest
import torch

from tests.glm_flash.oracle import UNEVEN, build_reference
from tests.glm_flash.support import (
    build_native,
    draw_cotangents,
    draw_tokens,
    gradient_errors,
    relative_error,
    run_native,
    run_reference,
    smallest_margin,
    worst_row,
)

GROUPS = {"n_group": 4, "topk_group": 2}
MIXED = {
    "layer_types": ["deepseek_sparse_attention", "linear_attention"] * 2,
    "mlp_layer_types": ["sparse"] * 4,
}

# Relative error of outputs, and of gradients. The oracle computes in float64, so float32's errors
# are this model's alone; in float64 nothing is left but rounding.
TOLERANCES = {torch.float32: (2e-5, 1e-3), torch.float64: (1e-12, 1e-10)}

# Length, seed, changes. Seeds are such that no selection is a matter of float32's rounding. The
# oracle's defaults choose 2 pools of 4 tokens, so documents above 11 tokens are sparse.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    **{f"{length}_tokens": (length, 1, {}) for length in (1, 3, 4, 5, 37, 64, 65)},
    "130_tokens": (130, 3, {}),
    "130_tokens_again": (130, 5, {}),
    "400_tokens": (400, 1, {}),
    "groups": (130, 1, GROUPS),
    "groups_again": (65, 3, GROUPS),
    "topk_16": (130, 4, {"index_topk": 16}),
    "topk_64": (400, 1, {"index_topk": 64}),
    "low_limit": (130, 0, {"swiglu_limit": 0.5}),
    "low_limit_again": (65, 4, {"swiglu_limit": 0.5}),
    "uneven_widths": (130, 0, UNEVEN),
    "uneven_widths_long": (300, 0, UNEVEN),
    "uneven_widths_groups": (65, 2, UNEVEN | GROUPS),
    "other_order": (65, 0, MIXED),
    "raw_scores": (37, 0, {"norm_topk_prob": False}),
}


@pytest.mark.parametrize(("length", "seed", "changes"), CASES.values(), ids=CASES.keys())
def test_outputs_gradients_and_pools_equal_transformers(
    length: int, seed: int, changes: dict[str, Any]
) -> None:
    reference = build_reference(seed, **changes)
    natives = [build_native(reference, trimmed) for trimmed in (False, True)]
    reference = reference.double()
    tokens = draw_tokens(length, seed)
    assert smallest_margin(reference, tokens) > 5e-5, "a choice is too close; take another seed"
    cotangents = draw_cotangents(length, reference, seed)
    expected = run_reference(reference, tokens, [t.double() for t in cotangents])
    assert expected.logits.dtype == torch.float64

    for native, (dtype, (output_error, gradient_error)) in product(natives, TOLERANCES.items()):
        actual = run_native(native.to(dtype), tokens, [t.to(dtype) for t in cotangents])
        assert actual.logits.dtype == dtype
        assert len(actual.pools) == len(expected.pools) > 0
        for chosen, right in zip(actual.pools, expected.pools, strict=True):
            assert torch.equal(chosen, right)
        assert relative_error(actual.hidden, expected.hidden) < output_error
        assert relative_error(actual.logits, expected.logits) < output_error
        # No single token is far off either.
        assert worst_row(actual.logits, expected.logits) < 10 * output_error
        errors = gradient_errors(actual, expected)
        assert {name: error for name, error in errors.items() if not error < gradient_error} == {}


def test_the_oracle_is_sparse_and_no_gradient_is_empty_where_it_is_compared() -> None:
    """What keeps the comparison above from passing by comparing nothing."""
    reference = build_reference(1)
    tokens = draw_tokens(130, 1)
    expected = run_reference(reference, tokens, draw_cotangents(130, reference, 1))
    open_pools = (torch.arange(130) + 1) // 4
    assert torch.equal(expected.pools[0].sum(1), open_pools.clamp(max=2))
    assert not expected.pools[0][-1, -2:].all()
    assert all(grad.norm() > 0 for grad in expected.grads.values())
    names = set(expected.grads)
    with_grad = {n for n, _ in build_native(reference).named_parameters() if "indexer" not in n}
    assert names == with_grad


def test_a_wrong_value_anywhere_is_seen() -> None:
    """Noise of 30 % in any one parameter moves the outputs by far more than the tolerance."""
    reference = build_reference(1)
    tokens = draw_tokens(45, 1)
    native = build_native(reference)
    generator = torch.Generator().manual_seed(0)
    errors = {}
    with torch.no_grad():
        right = native(tokens.unsqueeze(0))
        for name, parameter in native.named_parameters():
            before = parameter.clone()
            size = 0.3 * parameter.square().mean().sqrt()
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
            errors[name] = relative_error(native(tokens.unsqueeze(0)), right)
            parameter.copy_(before)
    assert [name for name, error in errors.items() if error < 1e-3] == []
