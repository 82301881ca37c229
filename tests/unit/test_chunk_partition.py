"""Chunks of a rank's tokens."""

import pytest
import torch

from components.expert_dispatch.counts import fullest
from components.expert_dispatch.partition import ChunkRule, Membership, agree, chunk_of
from tests.send_tables import send_table

MEMBERSHIPS: tuple[Membership, ...] = ("strided", "contiguous")
both = pytest.mark.parametrize("membership", MEMBERSHIPS)


def rule(chunk_tokens: int, max_chunks: int, membership: Membership = "strided") -> ChunkRule:
    return ChunkRule(chunk_tokens=chunk_tokens, max_chunks=max_chunks, membership=membership)


@both
@pytest.mark.parametrize("tokens", [0, 1, 3, 7, 24, 25])
@pytest.mark.parametrize("largest", [25, 100])
def test_every_token_is_in_one_chunk_whatever_other_ranks_hold(
    tokens: int, largest: int, membership: Membership
) -> None:
    cut = rule(7, 10, membership).cut(tokens, largest)
    whole = torch.arange(tokens)
    chunks = [whole[cut.rows(i)] for i in range(cut.chunks)]
    assert torch.equal(torch.cat(chunks).sort().values, whole)
    assert [len(chunk) for chunk in chunks] == [cut.size(i) for i in range(cut.chunks)]
    assert max(map(len, chunks)) == cut.chunk_tokens
    for i, chunk in enumerate(chunks):
        assert (chunk_of(tokens, cut.chunks, membership, "cpu")[chunk] == i).all()


def test_the_fullest_rank_and_the_ceiling_decide_how_many_chunks_there_are() -> None:
    for tokens, largest, chunks in [(10, 10, 1), (11, 11, 2), (0, 11, 2), (0, 0, 1), (3, 99, 4)]:
        assert rule(10, 4).cut(tokens, largest).chunks == chunks


def test_beyond_the_ceiling_chunks_grow() -> None:
    cut = rule(10, 4).cut(100)
    assert (cut.chunks, cut.chunk_tokens) == (4, 25)


@both
@pytest.mark.parametrize("chunk_tokens", [3, 10, 10**30])
@pytest.mark.parametrize("tokens", [0, 1, 25])
def test_the_device_cuts_as_the_host_does_without_knowing_into_how_many(
    tokens: int, chunk_tokens: int, membership: Membership
) -> None:
    cutter = rule(chunk_tokens, 4, membership)
    for largest in (25, 60):
        chunks = cutter.chunks_on_device(torch.tensor([largest]))
        cut = cutter.cut(tokens, largest)
        assert chunks.tolist() == [cut.chunks]
        found = chunk_of(tokens, chunks, membership, "cpu")
        assert torch.equal(found, chunk_of(tokens, cut.chunks, membership, "cpu"))
        for i in range(cut.chunks):
            assert (found == i).sum() == cut.size(i)
    assert cutter.chunks_on_device(torch.tensor([0])).tolist() == [cutter.cut(0).chunks]


def test_strided_chunks_take_every_kth_token_and_contiguous_ones_neighbours() -> None:
    whole = torch.arange(7)
    strided, contiguous = (rule(3, 9, m).cut(7) for m in MEMBERSHIPS)
    assert [whole[strided.rows(i)].tolist() for i in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [whole[contiguous.rows(i)].tolist() for i in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    with pytest.raises(IndexError, match="chunk 3 of 3"):
        strided.rows(3)


def test_rows_write_into_the_tokens_they_were_read_from() -> None:
    cut, out = rule(4, 9).cut(10), torch.zeros(10, 2)
    for i in range(cut.chunks):
        out[cut.rows(i)] = float(i)
    assert torch.equal(out[:, 0].long(), chunk_of(10, cut.chunks, cut.membership, "cpu"))


@both
def test_what_a_rank_sends_per_chunk_is_what_its_routes_amount_to(membership: Membership) -> None:
    generator = torch.Generator().manual_seed(0)
    destination = torch.randint(4, (23, 3), generator=generator)
    cut = rule(5, 9, membership).cut(23)
    for i, sent in enumerate(send_table(cut, destination, 4).tolist()):
        assert sent == torch.bincount(destination[cut.rows(i)].flatten(), minlength=4).tolist()


@both
def test_no_chunk_brings_a_rank_more_than_all_routes_of_the_largest_chunks(
    membership: Membership,
) -> None:
    """All ranks send everything to one: four of the fullest reach the bound, others do not."""
    cuts = [rule(6, 3, membership).cut(tokens, 40) for tokens in (40, 40, 1, 0)]
    sent = [send_table(cut, torch.zeros(cut.tokens, 2).long(), 4)[:, 0] for cut in cuts]
    assert int(sum(sent).max()) <= 4 * 2 * 14
    assert 4 * int(sent[0].max()) == 4 * 2 * 14


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens is 0; legal: 1 or more"),
        ({"max_chunks": -1}, "max_chunks is -1; legal: 1 or more"),
        ({"membership": "random"}, "membership is 'random'; legal: strided, contiguous"),
    ],
)
def test_rules_that_cannot_cut_are_refused(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ChunkRule(**{"chunk_tokens": 8, "max_chunks": 8} | settings)


def test_a_rank_that_holds_more_than_the_fullest_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens is 9; legal: 0 to largest, which is 8"):
        rule(4, 4).cut(9, 8)


def test_alone_a_rank_agrees_with_itself() -> None:
    assert agree(rule(4, 4), 9, None, torch.device("cpu")) == rule(4, 4).cut(9)


def test_the_fullest_ranks_tokens_follow_from_everyones_routes() -> None:
    """Of two ranks with two chunks and three experts, two routes a token; the second has none."""
    counts = torch.tensor([[[3, 1, 0], [0, 1, 1]], [[0, 0, 0], [0, 0, 0]]])
    assert fullest(counts, top_k=2) == 3
    assert fullest(counts.zero_(), top_k=2) == 0
