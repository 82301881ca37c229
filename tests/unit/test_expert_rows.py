"""Moving, weighing and summing experts' rows, against definitions in plain autograd."""

import math

import pytest
import torch

from kernels.combine import weighted_sum
from kernels.expert_rows.op import (
    gather,
    scatter,
    sum_places,
    swiglu,
    swiglu_gradients_,
    weigh_,
)
from kernels.swiglu import clamped_swiglu_reference

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_moved_between_strided_places(dtype: torch.dtype) -> None:
    rows, index = draw(9, 5, dtype=dtype)[::3], torch.tensor([2, 0, 2, 1])
    assert torch.equal(gather(rows, index, rows.new_empty(4, 5)), rows[index])
    out = torch.zeros(8, 5, dtype=dtype)
    scatter(rows, torch.tensor([3, 0, 2]), out[::2])
    assert torch.equal(out[[6, 0, 4]], rows) and not out[[1, 2, 3, 5, 7]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_follow_the_order_of_places_and_round_where_asked(dtype: torch.dtype) -> None:
    rows, place = draw(12, 5, dtype=dtype), torch.arange(12).flip(0).view(4, 3)
    weights, out = draw(4, 3, seed=1), torch.empty(8, 5, dtype=dtype)[::2]
    sum_places(rows, place, weights, out)
    assert torch.equal(out, weighted_sum(rows, place, weights))
    sum_places(rows, place, None, out)
    assert torch.equal(out, weighted_sum(rows, place, torch.ones(4, 3)))
    sum_places(rows, place, weights, out, rounded=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.zeros(4, 5, dtype=wide)
    for k in range(3):
        expected += (rows[place[:, k]].to(wide) * weights[:, k, None].to(wide)).to(dtype).to(wide)
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [math.inf, 0.5])
def test_swiglu_and_its_gradients_are_those_of_autograd(dtype: torch.dtype, limit: float) -> None:
    gate, up, back = (draw(7, 6, dtype=dtype, seed=seed) for seed in range(3))
    weights, wide = draw(7, seed=3), torch.float64 if dtype == torch.float64 else torch.float32
    g, u, w = (tensor.clone().requires_grad_() for tensor in (gate, up, weights.to(wide)))
    expected = clamped_swiglu_reference(g, u, limit)
    assert torch.equal(swiglu(gate, up, limit), expected)
    ((expected.to(wide) * w[:, None]) * back.to(wide)).sum().backward()
    dots = swiglu_gradients_(gate, up, back, weights, limit)
    assert torch.equal(back, expected)
    assert g.grad is not None and u.grad is not None and w.grad is not None
    for found, plain in ((gate, g.grad), (up, u.grad), (dots, w.grad)):
        assert found.dtype == plain.dtype
        torch.testing.assert_close(
            found, plain, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6
        )
    assert torch.equal(gate == 0, g.grad == 0) and torch.equal(up == 0, u.grad == 0)


def test_rows_are_weighed_in_full_precision() -> None:
    rows, weights = draw(6, 5, dtype=torch.bfloat16), draw(6, seed=1)
    expected = (rows.float() * weights[:, None]).bfloat16()
    weigh_(rows, weights)
    assert torch.equal(rows, expected)


def test_no_rows_are_no_work() -> None:
    nothing, nowhere = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    assert gather(nothing, nowhere, nothing).shape == (0, 5)
    assert swiglu_gradients_(nothing, nothing, nothing, torch.empty(0), 1.0).shape == (0,)
    sum_places(nothing, torch.empty(0, 3, dtype=torch.int64), None, nothing)
