"""Unrounded products, clamped SwiGLU, weighted sums and grouped products against definitions."""

import pytest
import torch

from kernels.combine import weighted_sum, weighted_sum_reference
from kernels.grouped_mm import grouped_mm, grouped_mm_loop
from kernels.precision import linear_accumulate
from kernels.swiglu import clamped_swiglu, clamped_swiglu_reference
from tests.unit.kernel_support import draw


def test_unrounded_linear_gradients():
    x, weight = draw(5, 6).requires_grad_(), draw(3, 6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(linear_accumulate, (x, weight))


def test_unrounded_linear_of_half_precision():
    x, weight = draw(5, 64).bfloat16(), draw(3, 64, seed=1).bfloat16().requires_grad_()
    out = linear_accumulate(x, weight)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("limit", [0.5, 10.0])
def test_swiglu_limits_and_gradients(limit):
    gate, up = (draw(7, 9, seed=s).mul(2).requires_grad_() for s in (0, 1))
    torch.testing.assert_close(
        clamped_swiglu(gate, up, limit), clamped_swiglu_reference(gate, up, limit)
    )
    assert torch.autograd.gradcheck(lambda g, u: clamped_swiglu(g, u, limit), (gate, up))


def test_swiglu_gate_has_no_lower_limit():
    low = torch.tensor([-30.0])
    expected = torch.nn.functional.silu(low) * -0.5
    assert clamped_swiglu(low, torch.tensor([-9.0]), 0.5) == expected


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_weighted_sum_and_gradients(tokens):
    rows, weights = draw(3 * tokens, 4).requires_grad_(), draw(tokens, 3, seed=1).requires_grad_()
    place = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(2)).view(tokens, 3)
    out = weighted_sum(rows, place, weights)
    torch.testing.assert_close(out, weighted_sum_reference(rows, place, weights))
    assert torch.autograd.gradcheck(lambda r, w: weighted_sum(r, place, w), (rows, weights))


def test_weighted_sum_of_half_precision_rounds_once():
    rows, weights = draw(40, 8).bfloat16(), draw(5, 8, seed=1).float()
    place = torch.randperm(40, generator=torch.Generator().manual_seed(2)).view(5, 8)
    exact = (rows[place].double() * weights.double().unsqueeze(-1)).sum(1)
    assert torch.equal(weighted_sum(rows, place, weights), exact.float().bfloat16())


@pytest.mark.parametrize("counts", [(4, 0, 3), (0, 0, 7), (0, 0, 0), (1, 1, 1)])
def test_grouped_product_equals_the_loop(counts):
    x = draw(sum(counts), 8, dtype=torch.float32)
    weight = draw(3, 16, 8, seed=1, dtype=torch.float32)
    ends = torch.tensor(counts).cumsum(0).int()
    results = []
    for product in (grouped_mm, grouped_mm_loop):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = product(a, b, ends)
        out.backward(draw(*out.shape, seed=3, dtype=torch.float32))
        results.append((out.detach(), a.grad, b.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
