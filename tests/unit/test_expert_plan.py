"""Plans over expert loads: what must hold for every one of them."""

import random

import pytest
import torch

from components.expert_dispatch.plan import Plan, imbalance, plan
from components.expert_dispatch.weights import rounds


def adversarial() -> list[tuple[str, list[int], int]]:
    """Name, loads, ranks."""
    return [
        ("nothing is routed", [0] * 8, 4),
        ("one row", [0, 0, 0, 1], 4),
        ("every row to one expert", [0] * 13 + [4099] + [0] * 2, 8),
        ("every row to one rank", [700, 701, 702, 703] + [0] * 12, 4),
        ("all equal", [64] * 16, 4),
        ("all equal but one row", [64] * 15 + [65], 4),
        ("ties across ranks", [9, 9, 1, 1, 9, 9, 1, 1], 4),
        ("one full rank, the others one row short", [10, 10, 9, 8, 9, 8, 9, 8], 4),
        ("falling by a half", [1 << (15 - e) for e in range(16)], 8),
        ("two of three full", [50, 50, 50, 50, 0, 0], 3),
        ("fewer rows than ranks", [1, 1, 1, 0, 0, 0, 0, 0], 8),
        ("one rank", [5, 0, 7], 1),
        ("a tail that is too short", [2100, 0, 0, 0, 0, 0, 0, 0], 8),
    ]


def drawn(seed: int) -> tuple[list[int], int]:
    """Loads from even to one expert having almost all."""
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 3, 4, 8, 16])
    experts = ranks * rng.randint(1, 6)
    sharpness = rng.choice([0.0, 0.5, 2.0, 8.0])
    scale = rng.choice([3, 100, 5000])
    return [int(scale * rng.random() ** sharpness) for _ in range(experts)], ranks


CASES = [(loads, ranks) for _, loads, ranks in adversarial()] + [drawn(s) for s in range(60)]
NAMES = [name for name, *_ in adversarial()] + [f"drawn {seed}" for seed in range(60)]
SETTINGS = [(1.0, 1), (1.0, 64), (1.1, 16), (1.5, 1024)]


def pieces(made: Plan) -> list[list[tuple[int, int, int]]]:
    """(begin, end, rank) of every expert's pieces that have rows, ascending."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in made.loads]
    columns = (made.expert, made.begin, made.end, made.rank)
    for expert, begin, end, rank in zip(*(c.tolist() for c in columns), strict=True):
        if begin < end:
            found[expert].append((begin, end, rank))
    return [sorted(of_expert) for of_expert in found]


@pytest.mark.parametrize(("loads", "ranks"), CASES, ids=NAMES)
def test_every_row_is_in_one_piece_and_no_rank_has_more_than_its_capacity(
    loads: list[int], ranks: int
) -> None:
    for factor, minimum in SETTINGS:
        made = plan(torch.tensor(loads), ranks, factor, minimum)
        for load, of_expert in zip(loads, pieces(made), strict=True):
            edges = [edge for begin, end, _ in of_expert for edge in (begin, end)]
            assert edges[::2] == [0, *edges[1:-1:2]] if load else not edges
            assert not load or edges[-1] == load
        total = sum(loads)
        most = max(-(-total // ranks), int(factor * total / ranks) + 1)
        assert int(made.rank_rows.max()) <= most
        assert int(made.rank_rows.sum()) == total


@pytest.mark.parametrize(("loads", "ranks"), CASES, ids=NAMES)
def test_an_experts_own_rank_has_its_first_rows_and_no_other_rank_two_pieces(
    loads: list[int], ranks: int
) -> None:
    share = len(loads) // ranks
    for factor, minimum in SETTINGS:
        made = plan(torch.tensor(loads), ranks, factor, minimum)
        for expert, of_expert in enumerate(pieces(made)):
            places = [rank for *_, rank in of_expert]
            assert len(set(places)) == len(places)
            assert expert // share not in places[1:]
        moved = [
            (expert, expert // share, rank)
            for expert, of_expert in enumerate(pieces(made))
            for rank in sorted(rank for *_, rank in of_expert)
            if rank != expert // share
        ]
        assert list(made.transfers) == moved


@pytest.mark.parametrize(("loads", "ranks"), CASES, ids=NAMES)
def test_rows_are_handed_on_only_by_ranks_above_capacity_and_only_the_excess(
    loads: list[int], ranks: int
) -> None:
    share, total = len(loads) // ranks, sum(loads)
    capacity = -(-total // ranks)
    made = plan(torch.tensor(loads), ranks)
    native = torch.tensor(loads).view(ranks, share).sum(1)
    over = (native - capacity).clamp(min=0)
    given = torch.zeros(ranks, dtype=torch.int64)
    for expert, of_expert in enumerate(pieces(made)):
        for begin, end, rank in of_expert:
            given[expert // share] += (end - begin) * (rank != expert // share)
    assert given.tolist() == over.tolist()


@pytest.mark.parametrize(("loads", "ranks"), CASES, ids=NAMES)
def test_a_piece_below_the_minimum_is_one_that_could_not_be_larger(
    loads: list[int], ranks: int
) -> None:
    share = len(loads) // ranks
    for minimum in (2, 16, 64, 1024):
        made = plan(torch.tensor(loads), ranks, minimum_rows=minimum)
        capacity = -(-sum(loads) // ranks)
        # Room only shrinks, so what is left at the end was there at every piece.
        room_left = max((capacity - made.rank_rows).tolist())
        for expert, of_expert in enumerate(pieces(made)):
            rows = [end - begin for begin, end, rank in of_expert if rank != expert // share]
            for place, size in enumerate(rows):
                is_last = place == len(rows) - 1
                too_few = is_last and sum(rows[-2:]) < 2 * minimum
                assert size >= minimum or too_few or room_left < minimum


def test_a_tail_below_the_minimum_grows_at_the_cost_of_the_piece_before_it() -> None:
    """Rank 0 has 120 rows too many; 100, then 98 fit elsewhere."""
    loads = torch.tensor([220, 0, 2, 98])
    assert [p[1] - p[0] for p in pieces(plan(loads, 4, 1.25, 1))[0]] == [100, 100, 20]
    assert [p[1] - p[0] for p in pieces(plan(loads, 4, 1.25, 30))[0]] == [100, 90, 30]
    # Two pieces of 70 would be more than there is.
    assert [p[1] - p[0] for p in pieces(plan(loads, 4, 1.25, 70))[0]] == [100, 100, 20]


def test_capacity_below_the_minimum_does_not_send_everything_to_one_rank() -> None:
    """Every rank's share is smaller than a piece should be."""
    loads = torch.zeros(32, dtype=torch.int64)
    loads[:2] = 800
    made = plan(loads, 16, minimum_rows=1024)
    assert made.rank_rows.tolist() == [100] * 16


def test_ties_go_to_the_lower_expert_and_the_lower_rank() -> None:
    made = plan(torch.tensor([4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 4, minimum_rows=1)
    # Expert 0 first; rank 1 before ranks 2 and 3, which have as little.
    assert pieces(made)[0] == [(0, 3, 1), (3, 4, 2)]
    assert pieces(made)[1] == [(0, 3, 3), (3, 4, 2)]
    assert pieces(made)[2] == [(0, 3, 0), (3, 4, 2)]
    assert made.transfers == ((0, 0, 1), (0, 0, 2), (1, 0, 2), (1, 0, 3), (2, 0, 2))


def test_a_plan_does_not_depend_on_how_often_or_where_it_is_made() -> None:
    loads, ranks = drawn(3)
    first, second = (plan(torch.tensor(loads), ranks) for _ in range(2))
    for name in ("rank", "expert", "begin", "end", "first"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert first.transfers == second.transfers


def test_gradients_come_home_in_rounds_that_a_rank_has_room_for() -> None:
    made = plan(torch.tensor([900, 700, 0, 0, 0, 0, 0, 0]), 4, minimum_rows=1)
    copies = [move for move in made.transfers if move.native == 0]
    assert len(copies) > 2
    found = rounds(made, 2)
    assert [found[move] for move in copies] == [place // 2 for place in range(len(copies))]


def test_a_capacity_beyond_all_rows_moves_nothing() -> None:
    assert plan(torch.tensor([9, 0]), 2, capacity_factor=1e308).transfers == ()


def test_even_loads_move_nothing() -> None:
    made = plan(torch.full((12,), 50), 4)
    assert made.transfers == ()
    assert made.held(2) == [6, 7, 8] and made.held_rows(2) == [50, 50, 50]


def test_below_the_threshold_nothing_moves() -> None:
    loads = torch.tensor([130, 90, 90, 90])
    assert imbalance(loads, 4) == 1.3
    assert plan(loads, 4, threshold=1.31).transfers == ()
    assert plan(loads, 4, threshold=1.3, minimum_rows=1).transfers != ()


def test_imbalance_is_that_of_ranks_not_of_experts() -> None:
    assert imbalance(torch.tensor([9, 1, 1, 9]), 2) == 1.0
    assert imbalance(torch.tensor([9, 0, 0, 0]), 4) == 4.0
    assert imbalance(torch.tensor([0, 0]), 2) == 1.0


def test_a_rank_holds_its_own_experts_first_and_those_without_rows_too() -> None:
    made = plan(torch.tensor([30, 30, 0, 0, 0, 0]), 3, minimum_rows=1)
    assert [made.held(rank) for rank in range(3)] == [[0, 1], [2, 3, 0], [4, 5, 0, 1]]
    assert [made.held_rows(rank) for rank in range(3)] == [[0, 20], [0, 0, 20], [0, 0, 10, 10]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"ranks": 3}, "4 experts cannot be shared evenly by 3 ranks"),
        ({"ranks": 0}, "4 experts cannot be shared evenly by 0 ranks"),
        ({"capacity_factor": 0.9}, "capacity_factor is 0.9; legal: 1 or more"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan"),
        ({"minimum_rows": 0}, "minimum_rows is 0; legal: 1 or more"),
        ({"threshold": 0.5}, "threshold is 0.5; legal: 1 or more"),
        ({"loads": torch.tensor([1.0, 2, 3, 4])}, "loads are torch.float32 on cpu"),
        ({"loads": torch.tensor([1, -2, 3, 4])}, "loads hold -2"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan(**{"loads": torch.tensor([1, 2, 3, 4]), "ranks": 2} | arguments)
