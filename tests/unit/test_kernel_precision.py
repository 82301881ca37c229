"""Half-precision inputs: where kernels round, and that sums are kept in full precision."""

import pytest
import torch

from components.models.glm_flash.documents import Documents
from kernels.combine import weighted_sum
from kernels.dsa import select
from kernels.dsa.indexer_loss import Teacher, indexer_kl
from kernels.dsa.pooling import find_pools, pool_keys
from kernels.dsa.select import pool_scores, select_pools, windows
from kernels.hyper_connections.mapping import project
from kernels.hyper_connections.merge import merge
from kernels.precision import linear_accumulate
from tests.unit.kernel_support import draw


def share_equal(found, exact):
    """Share of numbers that are the exact ones, rounded once."""
    return (found == exact.to(found.dtype)).float().mean().item()


def test_weighted_sum_of_half_precision_has_gradients_rounded_once():
    rows, weights = draw(40, 64).bfloat16().requires_grad_(), draw(5, 8, seed=1).float()
    weights.requires_grad_()
    place = torch.randperm(40, generator=torch.Generator().manual_seed(2)).view(5, 8)
    pull = draw(5, 64, seed=3).bfloat16()
    weighted_sum(rows, place, weights).backward(pull)
    wide = pull.double().unsqueeze(1)
    assert share_equal(rows.grad[place], wide * weights.detach().double().unsqueeze(-1)) > 0.99
    exact = (wide * rows.detach()[place].double()).sum(-1)
    torch.testing.assert_close(weights.grad.double(), exact, rtol=1e-5, atol=1e-5)


def test_unrounded_linear_has_gradients_rounded_once():
    x, weight = draw(50, 64).bfloat16(), draw(32, 64, seed=1).bfloat16()
    pull = draw(50, 32, seed=2).float()
    linear_accumulate(x.requires_grad_(), weight.requires_grad_()).backward(pull)
    assert share_equal(x.grad, pull.double() @ weight.detach().double()) > 0.99
    assert share_equal(weight.grad, pull.double().t() @ x.detach().double()) > 0.99


def test_scores_of_half_precision_are_not_rounded():
    q, k, w = draw(9, 4, 64).bfloat16(), draw(7, 64, seed=1).bfloat16(), draw(9, 4, seed=2).float()
    found = pool_scores(q, w, k, 0.125)
    assert found.dtype == torch.float32
    exact = pool_scores(q.double(), w.double(), k.double(), 0.125)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_pooled_keys_of_half_precision_round_the_weights_and_the_sum():
    keys, gates, ape = (
        draw(*s, seed=i).bfloat16() for i, s in enumerate([(40, 16), (40, 16), (4, 16)])
    )
    weight = torch.softmax(gates.float().view(10, 4, 16) + ape.float(), 1).bfloat16()
    expected = (weight * keys.view(10, 4, 16)).sum(1)
    found = pool_keys(keys, gates, ape, torch.arange(0, 40, 4))
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_windows_hold_no_more_queries_than_allowed():
    assert max(q1 - q0 for q0, q1, _, _ in windows((1,) * 5000, 4, 4)) == select._MAX_QUERIES


def test_no_window_of_scores_is_larger_than_the_budget(monkeypatch):
    sizes = []

    def watched(queries, weights, keys, scale):
        sizes.append(4 * queries.shape[0] * queries.shape[1] * keys.shape[0])
        return pool_scores(queries, weights, keys, scale)

    monkeypatch.setattr(select, "_SCORE_BYTES", 50_000)
    monkeypatch.setattr(select, "pool_scores", watched)
    lengths, documents = (400, 3, 200), Documents.from_lengths((400, 3, 200))
    pools = find_pools(lengths, 4, torch.device("cpu"))
    q, w, keys = draw(603, 8, 5), draw(603, 8), draw(len(pools.first), 5)
    select_pools(q, w, keys, pools, documents.position, lengths, size=4, count=3, scale=1.0)
    assert 25_000 < max(sizes) <= 50_000


@pytest.mark.parametrize("support", ["selected", "visible"])
def test_divergence_of_half_precision_is_not_rounded(support):
    lengths, total = (90, 37), 127
    documents, pools = Documents.from_lengths(lengths), find_pools(lengths, 4, torch.device("cpu"))
    low = [x.bfloat16() for x in (draw(total, 3, 8), draw(len(pools.first), 8, seed=2))]
    weights = draw(total, 3, seed=1).float()
    parts = [
        x.bfloat16()
        for x in (draw(total, 2, 6, seed=3), draw(total, 7, seed=4), draw(18, 7, seed=5))
    ]
    chosen = select_pools(low[0], weights, low[1], pools, documents.position, lengths,
                          size=4, count=6, scale=0.6)  # fmt: skip
    results = []
    for cast in (lambda x: x, torch.Tensor.double):
        inputs = [cast(x).requires_grad_() for x in (low[0], weights, low[1])]
        teacher = Teacher(*(cast(x) for x in parts), chosen, documents.position, documents.start,
                          lengths, 4, 0.4)  # fmt: skip
        loss = indexer_kl(*inputs, pools, teacher, 0.6, support)
        results.append((loss.detach(), *torch.autograd.grad(loss, inputs)))
    (loss, *grads), (exact, *right) = results
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[1].double(), right[1], rtol=1e-4, atol=1e-5)
    assert share_equal(grads[0], right[0]) > 0.98
    assert share_equal(grads[2], right[2]) > 0.98


def test_projection_of_half_precision_has_gradients_rounded_once():
    x, fn = (
        draw(50, 64).bfloat16().requires_grad_(),
        draw(24, 64, seed=1).bfloat16().requires_grad_(),
    )
    pull = draw(50, 24, seed=2).float()
    project(x, fn, 1e-5).backward(pull)
    a, b = (t.detach().double().requires_grad_() for t in (x, fn))
    project(a, b, 1e-5).backward(pull.double())
    assert share_equal(x.grad, a.grad) > 0.99
    assert share_equal(fn.grad, b.grad) > 0.99


def test_merge_of_half_precision_uses_the_rounded_weights_in_backward_too():
    low = [draw(50, 4, 32).bfloat16(), draw(50, 32, seed=1).bfloat16()]
    high = [draw(50, 4, seed=2).float(), draw(50, 4, 4, seed=3).float()]
    pull = draw(50, 4, 32, seed=4).bfloat16()
    inputs = [t.requires_grad_() for t in (*low, *high)]
    merge(*inputs).backward(pull)
    exact = [t.detach().double() for t in low] + [t.detach().bfloat16().double() for t in high]
    exact = [t.requires_grad_() for t in exact]
    merge(*exact).backward(pull.double())
    assert share_equal(inputs[0].grad, exact[0].grad) > 0.99
    assert share_equal(inputs[1].grad, exact[1].grad) > 0.99
    for found, right in zip(inputs[2:], exact[2:], strict=True):
        torch.testing.assert_close(found.grad.double(), right.grad, rtol=1e-5, atol=1e-4)
