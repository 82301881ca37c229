"""A layer's plan carried over to its chunks, and what is said of it."""

import random
from itertools import pairwise

import pytest
import torch

import components.expert_dispatch.layer_plan as layer_plan
from components.expert_dispatch.layer_plan import LayerPlan, PlanRule, scaled
from components.expert_dispatch.partition import ChunkRule
from components.expert_dispatch.plan import plan
from tests.swaps import counted


def counts_of(seed: int, ranks: int = 4, chunks: int = 3, experts: int = 8) -> torch.Tensor:
    """Uneven routes of every rank, chunk and expert; some experts without any."""
    rng = random.Random(seed)
    hot = [rng.choice([0, 1, 5, 80]) for _ in range(experts)]
    cells = [[[rng.randint(0, rows) for rows in hot] for _ in range(chunks)] for _ in range(ranks)]
    return torch.tensor(cells, dtype=torch.int64)


def layer_of(counts: torch.Tensor, rank: int = 0) -> LayerPlan:
    partition = ChunkRule(chunk_tokens=1, max_chunks=counts.shape[1]).cut(1, 99)
    rule = PlanRule(minimum_rows=1)
    return LayerPlan(rank=rank, counts=counts, partition=partition, rule=rule)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_a_chunk_hold_each_of_its_rows_once(seed: int) -> None:
    counts = counts_of(seed)
    layer = layer_of(counts)
    for index, chunk in enumerate(layer.chunks):
        loads = counts[:, index].sum(0)
        for expert in range(len(loads)):
            mine = chunk.plan.expert == expert
            bounds = zip(
                chunk.plan.begin[mine].tolist(), chunk.plan.end[mine].tolist(), strict=True
            )
            pieces = sorted(bound for bound in bounds if bound[0] < bound[1])
            assert all(first[1] == second[0] for first, second in pairwise(pieces))
            assert (pieces or [(0, 0)])[0][0] == 0
            assert (pieces or [(0, 0)])[-1][1] == int(loads[expert])
        assert torch.equal(chunk.rows.sum(1), counts[:, index].sum(1))


@pytest.mark.parametrize("seed", range(20))
def test_a_piece_has_the_share_of_a_chunk_that_it_has_of_the_layer(seed: int) -> None:
    counts = counts_of(seed)
    layer = layer_of(counts)
    whole = layer.plan
    for index, chunk in enumerate(layer.chunks):
        loads = counts[:, index].sum(0)[whole.expert].double()
        share = whole.rows.double() / whole.loads[whole.expert].clamp(min=1)
        assert float((chunk.plan.rows - share * loads).abs().max()) <= 1


def test_one_chunk_is_the_layer() -> None:
    layer = layer_of(counts_of(3, chunks=1))
    (chunk,) = layer.chunks
    assert layer.plan.transfers and chunk.plan.transfers == layer.plan.transfers
    for name in ("begin", "end", "rank", "expert", "loads"):
        assert torch.equal(getattr(chunk.plan, name), getattr(layer.plan, name)), name


def test_rows_of_a_chunk_are_found_when_first_asked_for() -> None:
    layer, calls = layer_of(counts_of(3)), []
    with counted(layer_plan, "exchange", calls):
        first = layer.chunk(1)
        assert layer.chunk(1) is first and len(calls) == 1
        assert layer.chunks[1] is first and len(calls) == 3


def test_shares_of_many_rows_are_exact() -> None:
    """A million tokens on each of 64 ranks: products of two counts beyond 32 bits."""
    loads = torch.tensor([2**29, 0, 0, 0], dtype=torch.int64)
    whole = plan(loads, 4)
    part = scaled(whole, loads // 8)
    assert part.rows.tolist() == (whole.rows // 8).tolist()


def test_a_layer_says_how_uneven_it_was_and_what_moved() -> None:
    counts = torch.zeros(2, 2, 4, dtype=torch.int64)
    counts[:, :, 0] = 5
    layers = [layer_of(counts, rank).load(10, 1000) for rank in range(2)]
    assert [layer.before for layer in layers] == [2.0, 2.0]
    assert [layer.after for layer in layers] == [1.0, 1.0]
    assert [layer.copies_sent for layer in layers] == [1, 0]
    assert [layer.copied_bytes for layer in layers] == [1000, 0]
    assert [(layer.receive_peak, layer.receive_peak_bytes) for layer in layers] == [(5, 50)] * 2


def test_no_token_anywhere_is_even() -> None:
    layer = layer_of(torch.zeros(2, 1, 4, dtype=torch.int64)).load(10, 1000)
    assert (layer.before, layer.after, layer.receive_peak, layer.copies_sent) == (1.0, 1.0, 0, 0)


@pytest.mark.parametrize("name", ["capacity_factor", "minimum_rows", "threshold"])
@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_a_rule_refuses_what_is_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*legal: 1 or more"):
        PlanRule(**{name: value})
