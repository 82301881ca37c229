"""Pools, selection and sparse attention against definitions written token by token."""

import pytest
import torch

from components.models.glm_flash.documents import Documents
from kernels.dsa import absorbed, plain, select
from kernels.dsa.keys import selected_tokens
from kernels.dsa.naive import dense_sparse_mla, token_mask
from kernels.dsa.pooling import find_pools, pool_keys
from kernels.dsa.select import best_pools, pool_scores, select_pools, windows
from tests.unit.kernel_support import draw

RAGGED = [(1,), (3,), (4,), (5,), (37,), (1, 4, 3, 9, 64, 2, 5), (130, 7), (65, 1, 1, 66)]


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_pools_lie_inside_one_document_and_count_from_its_start(lengths, size):
    pools = find_pools(lengths, size, torch.device("cpu"))
    first, token, before = [], 0, []
    for length in lengths:
        before += [len(first)] * length
        first += [token + p * size for p in range(length // size)]
        token += length
    assert pools.first.tolist() == first
    assert pools.before.tolist() == before


def test_pooled_key_is_a_weighted_mean_per_channel():
    keys, gates, ape = draw(11, 6), draw(11, 6, seed=1), draw(4, 6, seed=2)
    pooled = pool_keys(keys, gates, ape, torch.tensor([1, 7]))
    for row, first in zip(pooled, (1, 7), strict=True):
        weight = torch.softmax(gates[first : first + 4] + ape, 0)
        torch.testing.assert_close(row, (weight * keys[first : first + 4]).sum(0))


def test_pool_scores_add_relu_products_over_heads():
    q, w, k = draw(5, 3, 8), draw(5, 3, seed=1), draw(7, 8, seed=2)
    expected = torch.zeros(5, 7, dtype=torch.float64)
    for t in range(5):
        for p in range(7):
            expected[t, p] = sum(w[t, h] * max(0.0, 0.5 * q[t, h] @ k[p]) for h in range(3))
    torch.testing.assert_close(pool_scores(q, w, k, 0.5), expected)


def choose_one_by_one(scores, allowed, count):
    """Best first; among equals the lowest column first."""
    rows = []
    for row, open_ in zip(scores.tolist(), allowed.tolist(), strict=True):
        order = sorted((c for c in range(len(row)) if open_[c]), key=lambda c: (-row[c], c))
        rows.append(sorted(order[:count]))
    return rows


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
def test_ties_go_to_the_lowest_pool(count):
    # Few distinct values, zero among them, as sums of relus have; and rows with few open pools.
    scores = torch.randint(-1, 2, (50, 20), generator=torch.Generator().manual_seed(1)).float()
    allowed = torch.rand(50, 20, generator=torch.Generator().manual_seed(2)) < 0.6
    allowed[0], allowed[1] = False, True
    chosen = best_pools(scores, allowed, count)
    found = [row.nonzero().flatten().tolist() for row in chosen]
    assert found == choose_one_by_one(scores, allowed, count)


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("budget", [2**28, 1])
def test_selection_equals_sorting_each_query(lengths, budget, monkeypatch):
    monkeypatch.setattr(select, "_SCORE_BYTES", budget)
    documents, size, count = Documents.from_lengths(lengths), 4, 3
    total = sum(lengths)
    q, w = draw(total, 2, 5), draw(total, 2, seed=1)
    pools = find_pools(lengths, size, q.device)
    keys = draw(len(pools.first), 5, seed=2)
    chosen = select_pools(
        q, w, keys, pools, documents.position, lengths, size=size, count=count, scale=0.3
    )
    scores = pool_scores(q, w, keys, 0.3)
    for t in range(total):
        base = int(pools.before[t])
        visible = (int(documents.position[t]) + 1) // size
        allowed = torch.ones(1, visible, dtype=torch.bool)
        expected = choose_one_by_one(scores[t : t + 1, base : base + visible], allowed, count)[0]
        assert [p for p in chosen[t].tolist() if p >= 0] == expected
        assert all(p == -1 for p in chosen[t, len(expected) :].tolist())


@pytest.mark.parametrize("lengths", [(7,), (5000,), (1,) * 900 + (3000,), (2000, 1500, 3)])
def test_windows_cover_every_query_once_within_the_budget(lengths, monkeypatch):
    monkeypatch.setattr(select, "_SCORE_BYTES", 100_000)
    seen = 0
    for q0, q1, p0, p1 in windows(lengths, 4, 8):
        assert q0 == seen and q1 > q0
        assert (q1 - q0) * max(1, p1 - p0) * 8 <= 100_000 or q1 - q0 == 1
        seen = q1
    assert seen == sum(lengths)


def test_up_to_topk_tokens_everything_before_a_query_is_seen():
    lengths, size, count = (3 * 4 + 3, 20), 4, 3
    documents = Documents.from_lengths(lengths)
    pools = find_pools(lengths, size, torch.device("cpu"))
    keys = draw(len(pools.first), 4)
    chosen = select_pools(
        draw(35, 2, 4), draw(35, 2), keys, pools, documents.position, lengths,
        size=size, count=count, scale=1.0,
    )  # fmt: skip
    mask = token_mask(chosen, documents.position, documents.start, size)
    assert torch.equal(mask[:15, :15], torch.ones(15, 15).tril().bool())
    assert mask[15 + 19, 15:].sum() == 12


@pytest.mark.parametrize("lengths", RAGGED)
def test_selected_tokens_are_the_pools_and_the_tail(lengths):
    documents, size = Documents.from_lengths(lengths), 4
    chosen = random_choice(documents, lengths, size, 2)
    tokens, used = selected_tokens(chosen, documents.position, documents.start, size)
    mask = token_mask(chosen, documents.position, documents.start, size)
    for t in range(sum(lengths)):
        assert sorted(tokens[t][used[t]].tolist()) == mask[t].nonzero().flatten().tolist()
        assert mask[t].any()


def random_choice(documents, lengths, size, count):
    pools = find_pools(lengths, size, torch.device("cpu"))
    total = sum(lengths)
    return select_pools(
        draw(total, 1, 3), draw(total, 1, seed=4).abs(), draw(len(pools.first), 3, seed=5), pools,
        documents.position, lengths, size=size, count=count, scale=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [(1,), (3,), (5,), (37,), (1, 4, 3, 9, 64, 2, 5)])
@pytest.mark.parametrize("budget", [2**28, 20_000])
def test_sparse_attention_and_every_gradient(lengths, budget, monkeypatch):
    monkeypatch.setattr(absorbed, "CHUNK_BYTES", budget)
    documents, size, total = Documents.from_lengths(lengths), 4, sum(lengths)
    chosen = random_choice(documents, lengths, size, 2)
    inputs = draw(total, 3, 6), draw(total, 5, seed=1), draw(3 * (6 + 7), 5, seed=2)
    results = []
    for attend in (dense_sparse_mla, plain.sparse_mla):
        q, latent, kv_b = (x.clone().requires_grad_() for x in inputs)
        out = attend(
            q, latent, kv_b, chosen, documents.position, documents.start, size=size, scale=0.4
        )
        out.backward(draw(*out.shape, seed=3))
        results.append((out.detach(), q.grad, latent.grad, kv_b.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_half_precision_inputs_lose_nothing_inside():
    lengths, size = (50, 13), 4
    documents = Documents.from_lengths(lengths)
    chosen = random_choice(documents, lengths, size, 3)
    inputs = [draw(63, 2, 8), draw(63, 6, seed=1), draw(2 * 16, 6, seed=2)]
    low = [x.bfloat16() for x in inputs]
    options = {"size": size, "scale": 0.35}
    place = (chosen, documents.position, documents.start)
    exact = dense_sparse_mla(*(x.double() for x in low), *place, **options)
    found = plain.sparse_mla(*low, *place, **options)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16()) or (found - exact).abs().max() < 2**-8
