"""How a packed batch is cut over context-parallel ranks."""

import pytest
import torch

from components.context_parallel.layout import KINDS, Layout, cut_batch
from components.context_parallel.order import Order
from kernels.packed import bounds

CPU = torch.device("cpu")
DEGREES = range(1, 9)
BATCHES = {
    "one document": (256,),
    "ragged": (37, 90, 53, 1, 2, 75),
    "shorter than a share": (5, 3, 6, 2, 9, 1, 7, 4) * 8,
    "single tokens": (1,) * 140,
    "single tokens and a long one": (1,) * 21 + (107,) + (1,) * 30,
    "odd total": (131, 66, 2),
}
EVERY = [
    pytest.param(BATCHES[name], ranks, kind, id=f"{name}, {kind} over {ranks}")
    for name in BATCHES
    for kind in KINDS
    for ranks in DEGREES
]

cuts = pytest.mark.parametrize(("lengths", "ranks", "kind"), EVERY)


def document_and_position(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(d, p) for d, length in enumerate(lengths) for p in range(length)]


@cuts
def test_every_token_is_held_once_and_comes_back(lengths, ranks, kind):
    layout = cut_batch(lengths, ranks, kind)
    held = [layout.order.index(rank, CPU) for rank in range(ranks)]
    assert [len(index) for index in held] == [layout.tokens_of(rank) for rank in range(ranks)]
    packed = torch.cat(held)
    assert torch.equal(packed.sort().values, torch.arange(sum(lengths)))
    rows = torch.arange(sum(lengths)) * 7
    assert torch.equal(rows[packed][layout.order.packed_of_batch(CPU)], rows)
    padded = torch.full((ranks, layout.order.most), -1)
    for rank, index in enumerate(held):
        padded[rank, : len(index)] = rows[index]
    assert torch.equal(padded.flatten()[layout.order.padded_of_batch(CPU)], rows)


@cuts
def test_parts_are_cut_at_pools_and_know_their_documents(lengths, ranks, kind):
    layout, begins = cut_batch(lengths, ranks, kind), bounds(lengths)
    tokens = document_and_position(lengths)
    assert layout.parts[0].begin == 0 and layout.tokens == sum(lengths)
    for part, after in zip(layout.parts, layout.parts[1:], strict=False):
        assert part.stop == after.begin
        assert part.carries == after.continued
        assert after.begin in begins or tokens[after.begin][1] % 4 == 0
    for part in layout.parts:
        assert part.ahead == tokens[part.begin][1]
        inside = [document for document, _ in tokens[part.begin : part.stop]]
        assert part.lengths == tuple(inside.count(d) for d in sorted(set(inside)))
        assert len(part) >= 5 or ranks == 1


@cuts
def test_tokens_know_their_documents(lengths, ranks, kind):
    layout, tokens = cut_batch(lengths, ranks, kind), document_and_position(lengths)
    for rank in range(ranks):
        mine = [tokens[t] for t in layout.order.index(rank, CPU).tolist()]
        found = zip(layout.document_numbers(rank), layout.positions(rank), strict=True)
        assert [(int(d), int(p)) for d, p in found] == mine
        fragments = layout.fragments(rank)
        assert sum(fragments) == len(mine) and min(fragments) > 0


@cuts
def test_shares_differ_by_less_than_an_alignment_per_cut(lengths, ranks, kind):
    layout = cut_batch(lengths, ranks, kind)
    each = len(layout.parts) // ranks
    for rank in range(ranks):
        # Two cuts for each part, each moved by two tokens at most, and rounded.
        assert abs(layout.tokens_of(rank) - sum(lengths) / ranks) <= each * 5


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_zigzag_holds_one_part_of_each_half(lengths):
    layout = cut_batch(lengths, 4, "zigzag")
    assert [layout.held(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert cut_batch(lengths, 4, "contiguous").owners == (0, 1, 2, 3)


def test_fragments_and_rows_follow_a_ranks_tokens():
    layout = cut_batch((21, 43), 2, "zigzag")
    assert [(part.begin, part.stop) for part in layout.parts] == [
        (0, 16), (16, 33), (33, 49), (49, 64),
    ]  # fmt: skip
    assert layout.fragments(0) == (16, 15) and layout.fragments(1) == (5, 12, 16)
    assert layout.rows(1) == (slice(0, 17), slice(17, 33))
    assert layout.parts[1].ahead == 16 and layout.parts[1].carries and layout.crosses
    assert not cut_batch((32, 32), 2, "contiguous").crosses


def pairs_one_by_one(layout: Layout, rank: int) -> int:
    tokens = document_and_position(layout.lengths)
    return sum(tokens[t][1] + 1 for t in layout.order.index(rank, CPU).tolist())


@cuts
def test_causal_work_is_counted_exactly(lengths, ranks, kind):
    layout = cut_batch(lengths, ranks, kind)
    work = [pairs_one_by_one(layout, rank) for rank in range(ranks)]
    assert [layout.pairs(rank) for rank in range(ranks)] == work
    assert layout.imbalance == pytest.approx(max(work) * ranks / sum(work))


def test_zigzag_balances_one_document_and_contiguous_does_not():
    # Contiguous: the last of C shares has 2 - 1 / C times the mean.
    for ranks in (2, 4, 8):
        long = (ranks * 4096,)
        assert cut_batch(long, ranks, "zigzag").imbalance == pytest.approx(1, abs=1e-3)
        expected = 2 - 1 / ranks
        assert cut_batch(long, ranks, "contiguous").imbalance == pytest.approx(expected, abs=1e-3)


def test_rows_other_than_tokens_are_ordered_alike():
    layout = cut_batch((21, 43), 2, "zigzag")
    order = layout.order_of([3, 0, 2, 1])
    assert order == Order((3, 0, 2, 1), (0, 1, 1, 0), (4, 2))
    assert order.index(0, CPU).tolist() == [0, 1, 2, 5]
    assert order.index(1, CPU).tolist() == [3, 4]
    assert order.padded_of_batch(CPU).tolist() == [0, 1, 2, 4, 5, 3]


@pytest.mark.parametrize(
    ("lengths", "ranks", "kind", "message"),
    [
        ((40,), 0, "zigzag", "context_parallel_degree: 0 .* legal: 1 to 2"),
        ((40,), 3, "zigzag", "context_parallel_degree: 3 .* 40 tokens .* legal: 1 to 2"),
        ((40,), 6, "contiguous", "legal: 1 to 5"),
        ((7,), 2, "contiguous", "legal: 1 to 1"),
        ((40,), 2, "striped", "kind: 'striped'; legal: contiguous, zigzag"),
        ((40, 0), 2, "zigzag", "lengths"),
        ((), 1, "zigzag", "lengths"),
    ],
)
def test_what_cannot_be_cut_is_refused(lengths, ranks, kind, message):
    with pytest.raises(ValueError, match=message):
        cut_batch(lengths, ranks, kind)


def test_no_alignment_below_one_token():
    with pytest.raises(ValueError, match="align: 0; legal"):
        cut_batch((40,), 2, "zigzag", 0)


@pytest.mark.parametrize("align", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_legal_batch_has_no_part_of_an_alignment_or_less(kind, align):
    generator = torch.Generator().manual_seed(align)
    total = 3 * 2 * align * (2 if kind == "zigzag" else 1)
    for _ in range(50):
        ends = torch.randperm(total - 1, generator=generator)[:4].add(1).sort().values.tolist()
        lengths = tuple(b - a for a, b in zip([0, *ends], [*ends, total], strict=True))
        assert min(len(part) for part in cut_batch(lengths, 3, kind, align).parts) > align
