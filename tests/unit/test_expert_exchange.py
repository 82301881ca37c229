"""Where every route of a plan goes, against a route-by-route simulation."""

import random

import pytest
import torch

from components.expert_dispatch.exchange import Exchange, Placement, exchange
from components.expert_dispatch.plan import Plan, plan


class Group:
    """Ranks with routes of their own, planned for together."""

    def __init__(self, ids: list[torch.Tensor], experts: int, minimum_rows: int = 1) -> None:
        self.ids, self.ranks = ids, len(ids)
        counts = [torch.bincount(routes.flatten(), minlength=experts) for routes in ids]
        self.counts = torch.stack(counts)
        self.plan: Plan = plan(self.counts.sum(0), self.ranks, minimum_rows=minimum_rows)
        self.exchange: Exchange = exchange(self.plan, self.counts)
        placement = Placement.of(self.plan, "cpu")
        self.holdings = [
            placement.holdings(routes, self.counts, rank) for rank, routes in enumerate(ids)
        ]

    def expected(self) -> list[torch.Tensor]:
        """The holding of every route, found by counting through each expert's rows."""
        seen = [0] * len(self.plan.loads)
        columns = (self.plan.expert, self.plan.begin, self.plan.end)
        table = list(zip(*(c.tolist() for c in columns), strict=True))
        found = []
        for routes in self.ids:
            places = []
            for expert in routes.flatten().tolist():
                row, seen[expert] = seen[expert], seen[expert] + 1
                (place,) = (
                    h
                    for h, (of, begin, end) in enumerate(table)
                    if of == expert and begin <= row < end
                )
                places.append(place)
            found.append(torch.tensor(places, dtype=torch.int64).view_as(routes))
        return found


def drawn(seed: int) -> Group:
    """Uneven routes; tokens that visit an expert twice; ranks with few tokens or none."""
    rng = random.Random(seed)
    ranks, top_k = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3])
    experts = ranks * rng.randint(1, 4)
    sharp = rng.choice([1, 4])
    sizes = [rng.choice([0, 1, 7, 30]) for _ in range(ranks)]
    ids = [
        [[int(experts * rng.random() ** sharp) for _ in range(top_k)] for _ in range(size)]
        for size in sizes
    ]
    return Group([torch.tensor(x, dtype=torch.int64).view(-1, top_k) for x in ids], experts)


def everything_to_one() -> Group:
    return Group([torch.full((9, 2), 3)] * 4, 8)


def nothing() -> Group:
    return Group([torch.zeros(0, 2, dtype=torch.int64)] * 4, 8)


GROUPS = [everything_to_one, nothing, *(lambda s=s: drawn(s) for s in range(25))]
every_group = pytest.mark.parametrize(
    "make", GROUPS, ids=["one", "none", *(f"drawn {seed}" for seed in range(25))]
)


@every_group
def test_every_route_goes_where_the_plan_puts_its_row(make) -> None:
    group = make()
    for found, expected in zip(group.holdings, group.expected(), strict=True):
        assert torch.equal(found, expected)


@every_group
def test_splits_and_arrivals_are_what_the_routes_amount_to(make) -> None:
    group = make()
    held = len(group.plan.rank)
    for source, holdings in enumerate(group.holdings):
        sent = torch.bincount(holdings.flatten(), minlength=held)
        assert torch.equal(group.exchange.rows[source], sent)
        per_rank = torch.bincount(group.plan.rank[holdings.flatten()], minlength=group.ranks)
        assert group.exchange.sent(source) == per_rank.tolist()
    for rank in range(group.ranks):
        arrivals = group.exchange.arrivals(rank)
        assert arrivals.sum(1).tolist() == group.exchange.received(rank)
        assert arrivals.sum(0).tolist() == group.plan.held_rows(rank)


@every_group
def test_sorting_by_holding_gives_each_rank_its_rows_expert_by_expert(make) -> None:
    """What a receiver finds, source after source, is described by ``arrivals`` alone."""
    group = make()
    for rank in range(group.ranks):
        arriving, described = [], []
        for source, holdings in enumerate(group.holdings):
            flat = holdings.flatten()
            order = flat.argsort(stable=True)
            first = sum(group.exchange.sent(source)[:rank])
            mine = order[first : first + group.exchange.sent(source)[rank]]
            arriving += group.ids[source].flatten()[mine].tolist()
            experts = torch.tensor(group.plan.held(rank))
            described += experts.repeat_interleave(group.exchange.arrivals(rank)[source]).tolist()
        assert arriving == described


def test_the_order_of_routes_is_that_of_their_tokens_within_every_piece() -> None:
    group = everything_to_one()
    rows = torch.cat([holdings.flatten() for holdings in group.holdings])
    # Expert 3 lives on rank 1, which keeps the first of its 72 rows.
    assert group.plan.rank[rows].tolist() == [1] * 18 + [0] * 18 + [2] * 18 + [3] * 18


@pytest.mark.parametrize("counts", [torch.ones(2, 4).long(), torch.zeros(4, 4).long()])
def test_counts_of_other_loads_are_refused(counts: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"do not add up to the plan's loads; legal: the \(4, 4\)"):
        exchange(plan(torch.tensor([4, 4, 4, 4]), 4), counts)
