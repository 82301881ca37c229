"""Hyper-connection kernels against their definitions, values and gradients."""

import pytest
import torch

from kernels.hyper_connections.mapping import project, project_reference
from kernels.hyper_connections.merge import merge, merge_reference
from kernels.hyper_connections.sinkhorn import sinkhorn, sinkhorn_reference


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_projection_equals_norm_then_linear(rows, size):
    # At 1e-3 the mean square is below eps, where a norm with eps outside the root would differ.
    x = (draw(rows, 12).detach() * size).requires_grad_()
    fn = draw(24, 12, seed=1)
    torch.testing.assert_close(project(x, fn, 1e-5), project_reference(x, fn, 1e-5))
    assert torch.autograd.gradcheck(lambda a, b: project(a, b, 1e-5), (x, fn))


def test_projection_of_half_precision_is_not_rounded():
    x, fn = draw(9, 64).detach().bfloat16(), draw(24, 64, seed=1).detach().bfloat16()
    z = project(x, fn, 1e-5)
    exact = project_reference(x.double(), fn.double(), 1e-5)
    assert z.dtype == torch.float32
    torch.testing.assert_close(z.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_gradient_and_sums(iterations):
    logits = draw(5, 4, 4)
    out = sinkhorn(logits, iterations, 1e-6)
    torch.testing.assert_close(out, sinkhorn_reference(logits, iterations, 1e-6))
    torch.testing.assert_close(out.sum(-2), torch.ones(5, 4).double(), rtol=0, atol=1e-5)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, iterations, 1e-6), (logits,))


def test_many_iterations_make_the_matrix_doubly_stochastic():
    out = sinkhorn(draw(5, 4, 4), 20, 1e-6)
    torch.testing.assert_close(out.sum(-1), torch.ones(5, 4).double(), rtol=0, atol=1e-3)


def test_merge_and_every_gradient():
    inputs = (
        draw(2, 3, 4, 6),
        draw(2, 3, 6, seed=1),
        draw(2, 3, 4, seed=2),
        draw(2, 3, 4, 4, seed=3),
    )
    torch.testing.assert_close(merge(*inputs), merge_reference(*inputs))
    assert torch.autograd.gradcheck(merge, inputs)


def test_merge_of_half_precision_rounds_where_the_definition_does():
    streams, out = draw(5, 4, 32).detach().bfloat16(), draw(5, 32, seed=1).detach().bfloat16()
    post, mix = draw(5, 4, seed=2).detach().float(), draw(5, 4, 4, seed=3).detach().float()
    found, expected = (f(streams, out, post, mix) for f in (merge, merge_reference))
    assert found.dtype == torch.bfloat16
    # Sums of four products in another order: at most the last bit, and rarely.
    assert (found != expected).float().mean() < 0.01
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
