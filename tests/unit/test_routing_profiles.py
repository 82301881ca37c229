"""Routing profiles, and what plans over them amount to, against published figures."""

from functools import cache

import pytest
import torch

from components.expert_dispatch.exchange import Placement, exchange
from components.expert_dispatch.partition import ChunkRule, Membership
from components.expert_dispatch.plan import Plan, imbalance, plan
from components.expert_dispatch.profiles import RoutingProfile
from tests.send_tables import send_table

EXPERTS, RANKS, TOP_K, TOKENS, CHUNKS = 128, 8, 8, 65_536, 10
"""The larger shape of arXiv 2609.14306, table 6."""


def ids(profile: str, tokens: int = 10, top_k: int = 3, experts: int = 6) -> list[list[int]]:
    return RoutingProfile.parse(profile).expert_ids(tokens, top_k, experts, "cpu").tolist()


def test_hot_tokens_come_first_and_the_others_take_turns() -> None:
    rows = ids("30/2")
    assert rows[:3] == [[0, 1, 0]] * 3
    assert rows[3] == [2 + 3 % 4, 2 + 4 % 4, 2 + 5 % 4]
    assert {expert for row in rows[3:] for expert in row} == {2, 3, 4, 5}


def test_more_hot_experts_than_routes_leave_some_of_them_cold() -> None:
    assert ids("50/5")[:5] == [[0, 1, 2]] * 5


def test_the_share_of_hot_tokens_is_rounded_down() -> None:
    rows = ids("99/3", tokens=11)
    assert rows.count([0, 1, 2]) == 10 and rows[10] == [3 + 10 % 3, 3 + 11 % 3, 3 + 12 % 3]


def test_all_tokens_may_be_hot_with_all_experts() -> None:
    assert ids("100/6", top_k=2) == [[0, 1]] * 10


def test_balanced_gives_every_expert_as_many_routes() -> None:
    drawn = RoutingProfile.parse("balanced").expert_ids(12, 3, 6, "cpu")
    assert torch.bincount(drawn.flatten()).tolist() == [6] * 6


@pytest.mark.parametrize(
    ("profile", "top_k", "repeats"),
    [("50/4", 8, True), ("50/8", 8, False), ("100/8", 8, False), ("balanced", 8, False),
     ("balanced", 17, True), ("50/12", 8, True), ("100/12", 8, False)],
)  # fmt: skip
def test_repeated_visits_are_foretold(profile: str, top_k: int, repeats: bool) -> None:
    assert RoutingProfile.parse(profile).repeats(top_k, 16) == repeats
    rows = ids(profile, tokens=40, top_k=top_k, experts=16)
    assert any(len(set(row)) < top_k for row in rows) == repeats


@pytest.mark.parametrize("text", ["", "80", "80/", "/16", "0/4", "101/4", "80/0", "80 / 16", "-1/4",
                                  "80/16/2", "8.5/4", "Balanced", "080/16", "80/1x"])  # fmt: skip
def test_what_is_no_profile_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="routing_profile is .*; legal: 'balanced', or .*'80/16'"):
        RoutingProfile.parse(text)


@pytest.mark.parametrize("text", ["balanced", "80/16", "100/1", "1/999"])
def test_a_profile_reads_back_as_it_was_written(text: str) -> None:
    assert str(RoutingProfile.parse(text)) == text


@pytest.mark.parametrize(
    ("profile", "says"),
    [("50/17", "17 hot experts are more than the 16"), ("50/16", "all 16 experts of a layer are")],
)
def test_profiles_that_a_layer_cannot_follow_are_refused(profile: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"routing profile '{profile}': {says}"):
        ids(profile, experts=16)


@cache
def planned(profile: str) -> tuple[torch.Tensor, torch.Tensor, Plan]:
    """Expert ids, the same on every rank; counts of all ranks; the plan, with capacity factor 1."""
    routes = RoutingProfile.parse(profile).expert_ids(TOKENS, TOP_K, EXPERTS, "cpu")
    counts = torch.bincount(routes.flatten(), minlength=EXPERTS).expand(RANKS, EXPERTS)
    return routes, counts, plan(counts.sum(0), RANKS)


@pytest.mark.parametrize("profile", ["30/16", "50/16", "80/16", "95/16", "30/4", "50/4"])
def test_plans_even_out_every_profile_with_ten_to_thirteen_transfers(profile: str) -> None:
    _, counts, made = planned(profile)
    assert imbalance(counts.sum(0), RANKS) > 2
    assert f"{imbalance(made.rank_rows, RANKS):.3f}" == "1.000"
    assert 10 <= len(made.transfers) <= 13


def test_balanced_routing_moves_nothing() -> None:
    assert planned("balanced")[2].transfers == ()


TABLE_8 = [
    ("balanced", "1.00", "1.02", 12.5, 12.7),
    ("95/16", "1.35", "2.63", 12.5, 15.8),
    ("80/16", "2.40", "4.00", 12.5, 15.6),
    ("50/4", "2.29", "6.00", 12.5, 17.1),
]
"""Profile; send ratio, strided then contiguous (both published); rows received in a chunk, percent
of the bound, strided then contiguous (published: 12.5 of all strided ones, 17.1 of 50/4)."""


@pytest.mark.parametrize(("profile", "strided", "contiguous", "s_received", "c_received"), TABLE_8)
def test_chunks_send_and_receive_what_was_published(
    profile: str, strided: str, contiguous: str, s_received: float, c_received: float
) -> None:
    assert chunk_statistics(profile, "strided") == (strided, s_received)
    assert chunk_statistics(profile, "contiguous") == (contiguous, c_received)


@cache
def destinations(profile: str) -> list[torch.Tensor]:
    """The rank of every route of each rank: int64 (N, k)."""
    routes, counts, made = planned(profile)
    placement = Placement.of(made, "cpu")
    return [placement.rank[placement.holdings(routes, counts, rank)] for rank in range(RANKS)]


def chunk_statistics(profile: str, membership: Membership) -> tuple[str, float]:
    """Largest over mean rows that a rank sends anywhere in a chunk; most received, percent."""
    _, counts, made = planned(profile)
    splits = exchange(made, counts).splits
    cut = ChunkRule(chunk_tokens=6_554, max_chunks=CHUNKS, membership=membership).cut(TOKENS)
    received = torch.zeros(CHUNKS, RANKS, dtype=torch.int64)
    worst = 0.0
    for rank, destination in enumerate(destinations(profile)):
        sent = send_table(cut, destination, RANKS)
        assert torch.equal(sent.sum(0), splits[rank])
        worst = max(worst, float((sent.amax(1) / sent.double().mean(1)).max()))
        received += sent
    # Every rank sends one of them all routes of its largest chunk.
    bound = RANKS * TOP_K * -(-TOKENS // CHUNKS)
    assert int(received.max()) <= bound
    return f"{worst:.2f}", round(100 * int(received.max()) / bound, 1)
