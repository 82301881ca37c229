"""The indexer's loss against its definition, written query by query."""

import pytest
import torch

from components.models.glm_flash.documents import Documents
from kernels.attach import attach_loss
from kernels.dsa import absorbed, indexer_loss, select
from kernels.dsa.indexer_loss import Teacher, indexer_kl
from kernels.dsa.naive import token_mask
from kernels.dsa.pooling import find_pools
from kernels.dsa.select import select_pools
from tests.unit.kernel_support import draw

SIZE, SCALE, INDEX_SCALE = 4, 0.4, 0.6


def case(lengths):
    documents, total = Documents.from_lengths(lengths), sum(lengths)
    pools = find_pools(lengths, SIZE, torch.device("cpu"))
    q, w = draw(total, 3, 5), draw(total, 3, seed=1)
    keys = draw(len(pools.first), 5, seed=2)
    chosen = select_pools(
        q, w, keys, pools, documents.position, lengths, size=SIZE, count=3, scale=INDEX_SCALE
    )
    teacher = Teacher(
        draw(total, 2, 6, seed=3), draw(total, 7, seed=4), draw(2 * (6 + 3), 7, seed=5), chosen,
        documents.position, documents.start, lengths, SIZE, SCALE,
    )  # fmt: skip
    return [x.requires_grad_() for x in (q, w, keys)], pools, teacher


def by_definition(q, w, keys, pools, teacher, support):
    t, total = teacher, torch.zeros((), dtype=torch.float64)
    count = len(t.position)
    key = (t.latent @ t.kv_b.t()).view(count, 2, -1)[..., :6]
    logits = torch.einsum("qhd,khd->hqk", t.q, key) * SCALE
    causal = torch.ones(count, count, dtype=torch.bool).tril() & (t.start[:, None] == t.start)
    mask = token_mask(t.chosen, t.position, t.start, SIZE) if support == "selected" else causal
    attention = logits.masked_fill(~mask, float("-inf")).softmax(-1).sum(0)
    for i in range(count):
        visible = range((int(t.position[i]) + 1) // SIZE)
        ids = [p for p in t.chosen[i].tolist() if p >= 0] if support == "selected" else visible
        if not len(ids):
            continue
        begins = [int(t.start[i]) + p * SIZE for p in ids]
        target = torch.stack([attention[i, b : b + SIZE].sum() for b in begins])
        target = target / target.sum()
        columns = [int(pools.before[i]) + p for p in ids]
        score = (w[i, :, None] * (q[i] @ keys[columns].t() * INDEX_SCALE).relu()).sum(0)
        total = total + (target * (target.log() - score.log_softmax(0))).sum()
    return total


@pytest.mark.parametrize("support", ["selected", "visible"])
@pytest.mark.parametrize("lengths", [(1,), (3,), (4,), (37,), (1, 4, 3, 9, 30, 2, 5)])
@pytest.mark.parametrize("budget", [2**28, 20_000])
def test_divergence_and_every_gradient(support, lengths, budget, monkeypatch):
    monkeypatch.setattr(absorbed, "CHUNK_BYTES", budget)
    monkeypatch.setattr(select, "_SCORE_BYTES", budget)
    inputs, pools, teacher = case(lengths)
    expected = by_definition(*inputs, pools, teacher, support)
    found = indexer_kl(*inputs, pools, teacher, INDEX_SCALE, support)
    torch.testing.assert_close(found, expected)
    found_grads = torch.autograd.grad(found * 3, inputs)
    if not expected.requires_grad:
        assert all((grad == 0).all() for grad in found_grads)
        return
    for a, b in zip(found_grads, torch.autograd.grad(expected * 3, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_an_indexer_that_scores_like_the_attention_has_no_divergence():
    inputs, pools, teacher = case((40,))
    assert indexer_kl(*inputs, pools, teacher, INDEX_SCALE, "selected") > 0.1
    flat = [torch.zeros_like(inputs[0]), *inputs[1:]]
    even = Teacher(*(torch.zeros_like(teacher.q), *indexer_loss._tensors(teacher)[1:]),
                   teacher.lengths, SIZE, SCALE)  # fmt: skip
    assert indexer_kl(*flat, pools, even, INDEX_SCALE, "selected").abs() < 1e-12


def test_an_attached_loss_is_felt_once_and_changes_no_value():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    out = attach_loss(x * 2, (y * 3).sum(), 0.5, seen.append)
    assert torch.equal(out, x * 2)
    (out.sum() * 5).backward()
    assert x.grad.tolist() == [10, 10]
    assert y.grad.tolist() == [1.5, 1.5]
    assert [float(value) for value in seen] == [6.0]
