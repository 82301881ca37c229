"""Which rows of the vocabulary are whose, and which tokens meet in which round."""

import random

import pytest
import torch

from components.vocabulary.choice import choose
from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.rounds import Rounds

LAYOUTS = [
    (40, 4, 4),
    (37, 4, 2),
    (9, 4, 4),
    (9, 4, 2),
    (3, 8, 4),
    (1, 2, 2),
    (17, 1, 1),
    (50, 6, 3),
]
LAYOUTS += [(random.Random(n).randint(1, 90), 8, 2 ** (n % 4)) for n in range(8)]


@pytest.mark.parametrize("numbers", LAYOUTS, ids=str)
def test_shards_are_those_of_torch_chunk(numbers: tuple[int, int, int]) -> None:
    layout = VocabularyLayout(*numbers)
    chunks = [c.tolist() for c in torch.arange(layout.vocabulary).chunk(layout.ranks)]
    chunks += [[]] * (layout.ranks - len(chunks))
    assert [list(layout.shard(rank)) for rank in range(layout.ranks)] == chunks


@pytest.mark.parametrize("numbers", LAYOUTS, ids=str)
def test_every_entry_has_one_owner_and_one_row(numbers: tuple[int, int, int]) -> None:
    layout = VocabularyLayout(*numbers)
    seen = []
    for q in range(layout.ring):
        rows = [row for piece in layout.pieces(q) for row in piece]
        seen += rows
        assert len(rows) == layout.rows(q) <= layout.widest <= layout.padded_rows
        owner, row = layout.owner_and_row(torch.tensor(rows, dtype=torch.int64))
        assert (owner == q).all() and row.tolist() == list(range(len(rows)))
        columns = layout.columns(torch.arange(layout.vocabulary), q)
        assert (columns >= 0).nonzero().flatten().tolist() == sorted(rows)
    assert sorted(seen) == list(range(layout.vocabulary))


@pytest.mark.parametrize("numbers", LAYOUTS, ids=str)
def test_padding_of_gathered_shards_is_at_the_end(numbers: tuple[int, int, int]) -> None:
    layout = VocabularyLayout(*numbers)
    for q in range(layout.ring):
        gathered: list[int] = []
        for rank in range(q, layout.ranks, layout.ring):
            shard = list(layout.shard(rank))
            gathered += shard + [-1] * (layout.chunk - len(shard))
        assert len(gathered) == layout.padded_rows
        rows = [row for piece in layout.pieces(q) for row in piece]
        assert gathered[: layout.rows(q)] == rows and set(gathered[layout.rows(q) :]) <= {-1}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((10, 4, 3), "ring is 3, which does not divide the 4 ranks .*; legal: 1, 2, 4"),
        ((0, 4, 2), "vocabulary is 0; it must be at least 1"),
        ((10, 4, 0), "ring is 0; it must be at least 1"),
    ],
)
def test_impossible_layouts_are_refused(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VocabularyLayout(*numbers)


@pytest.mark.parametrize(
    ("counts", "rows"),
    [([10], 4), ([8, 8], 4), ([9, 0], 4), ([5, 17, 0, 3], 8), ([0, 0], 2), ([1], 100), ([3, 4], 2)],
    ids=str,
)
def test_every_token_is_in_one_round_and_no_strip_is_too_long(counts: list[int], rows: int) -> None:
    rounds = Rounds.plan(counts, rows)
    met: list[list[int]] = [[] for _ in counts]
    for i in range(rounds.number):
        places = rounds.strip(i)
        length = places[-1].stop
        assert 0 < length <= rounds.strip_rows <= min(rows, rounds.gathered_rows)
        gathered = [-1] * rounds.gathered_rows
        for rank, place in enumerate(places):
            some = rounds.some(i, rank)
            tokens = list(range(some.start, some.stop))
            assert len(tokens) == place.stop - place.start
            met[rank] += tokens
            begin = rank * rounds.share
            gathered[begin : begin + len(tokens)] = [rank * 1000 + token for token in tokens]
        strip = [-2] * length
        runs = rounds.runs(i)
        for where, to in runs:
            strip[to] = gathered[where]
        assert strip == [g for g in gathered if g >= 0]
        assert all(a[0].stop < b[0].start for a, b in zip(runs, runs[1:], strict=False))
    assert met == [list(range(count)) for count in counts]


def test_rounds_are_few_and_even() -> None:
    assert Rounds.plan([4097], 4096) == Rounds((4097,), 2049, 2)
    assert Rounds.plan([4096, 100], 4096) == Rounds((4096, 100), 2048, 2)


def test_full_rounds_are_one_product() -> None:
    assert Rounds.plan([8, 8, 8], 12).runs(0) == [(slice(0, 12), slice(0, 12))]
    assert Rounds.plan([8, 0, 8], 12).runs(1) == [
        (slice(0, 4), slice(0, 4)),
        (slice(8, 12), slice(4, 8)),
    ]


@pytest.mark.parametrize(
    ("tokens", "summed", "schedule"),
    [
        (10**6, True, "fused"),
        (1, True, "fused"),
        (51, False, "move_weights"),
        (50, False, "move_activations"),
    ],
)
def test_choice(tokens: int, summed: bool, schedule: str) -> None:
    assert choose(tokens, VocabularyLayout(99, 2, 2), summed=summed) == schedule
