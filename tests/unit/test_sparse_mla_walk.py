"""The order in which the sparse attention's backward walks through keys, on the CPU."""

from typing import Any

import pytest
import torch

from kernels.sparse_mla import naive, tuned
from kernels.sparse_mla.inputs import Inputs, draw_inputs
from kernels.sparse_mla.plan import row_plan, slot_tokens
from kernels.sparse_mla.shape import TILE
from kernels.sparse_mla.tilelang_backward import backward
from kernels.sparse_mla.walk import Walk, launch, range_tiles

SCALE = 0.25
LENGTHS = (1, 2, 3, 5, 63, 65, 150, 17)
TOKENS = sum(LENGTHS)


def ragged(size: int, **more: Any) -> Inputs:
    """Documents of few tokens and many; some queries have no pools or no keys at all."""
    return draw_inputs(LENGTHS, heads=2, width=4, count=40, size=size, drop=0.1, **more)


class Partial:
    """The split kernel's sums over the tiles that it is given, in plain torch and float64."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen: list[torch.Tensor] = []

    def __call__(
        self,
        q: torch.Tensor,
        grad: torch.Tensor,
        latent: torch.Tensor,
        pools: torch.Tensor,
        plan: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        dq: torch.Tensor,
        dlatent: torch.Tensor,
        mass: torch.Tensor,
        walk: torch.Tensor,
        clock: torch.Tensor,
    ) -> None:
        assert walk.shape == (len(q), 2) and walk.is_contiguous() and clock.tolist() == [0]
        slots = -(-(pools.shape[1] * self.size + self.size) // TILE) * TILE
        tokens = slot_tokens(plan, pools, self.size, slots)
        tile = torch.arange(slots) // TILE
        mine = (tile >= walk[:, :1]) & (tile < walk[:, 1:]) & (tokens >= 0)
        self.seen.append(torch.where(mine, tokens, -1))
        keys = latent[tokens.clamp(min=0)]
        p = torch.exp(torch.einsum("qhd,qkd->qhk", q, keys) * SCALE - lse.unsqueeze(2))
        p = torch.where(mine.unsqueeze(1), p, 0.0)
        dp = torch.einsum("qhd,qkd->qhk", grad, keys)
        ds = torch.where(mine.unsqueeze(1), p * (dp - delta.unsqueeze(2)) * SCALE, 0.0)
        dq += torch.einsum("qhk,qkd->qhd", ds, keys)
        dkeys = torch.einsum("qhk,qhd->qkd", ds, q) + torch.einsum("qhk,qhd->qkd", p, grad)
        dlatent.index_add_(0, tokens.clamp(min=0).flatten(), dkeys.flatten(0, 1))
        of_pools = p.sum(1)[:, : pools.shape[1] * self.size].unflatten(1, (-1, self.size)).sum(2)
        # A pool is written by the launch that has its tile, and by no other.
        first = tile[: pools.shape[1] * self.size : self.size]
        group = torch.arange(pools.shape[1])
        written = (first >= walk[:, :1]) & (first < walk[:, 1:]) & (group < plan[:, :1])
        mass[0][written] = of_pools[written]


@pytest.mark.parametrize(("size", "range_tokens"), [(1, 30), (4, 70), (16, 64), (4, TOKENS + 1)])
def test_gradients_of_ranges_sum_to_the_twins(size: int, range_tokens: int) -> None:
    p = ragged(size, dtype=torch.float64)
    out, lse = naive.forward_reference(*p[:5], size=size, scale=SCALE)
    dq, dlatent = torch.empty_like(p.q), torch.zeros_like(p.latent)
    mass = torch.zeros(1, *p.pools.shape, dtype=torch.float64)
    plan = row_plan(p.pools, p.position, p.start, size)
    delta = (out * p.grad).sum(2)
    kernel = Partial(size)
    arguments = (p.q, p.grad, p.latent, p.pools, plan, lse, delta, dq, dlatent, mass)
    launch(kernel, range_tokens, size, *arguments)
    assert len(kernel.seen) == -(-TOKENS // range_tokens)
    wanted = naive.backward_reference(*p, size=size, scale=SCALE)
    # dq is added up in float32.
    assert torch.allclose(dq, wanted[0], atol=1e-5)
    assert torch.allclose(dlatent, wanted[1], atol=1e-12)
    assert torch.allclose(mass[0], wanted[2], atol=1e-12)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("range_tokens", [7, 64, 200, TOKENS - 1, TOKENS, TOKENS + 1])
def test_ranges_hold_every_tile_once_and_keys_near_their_own(size: int, range_tokens: int) -> None:
    p = ragged(size)
    plan = row_plan(p.pools, p.position, p.start, size)
    cuts = range_tiles(plan, p.pools, size, TOKENS, range_tokens)
    begin, end = cuts.unbind(2)
    assert cuts.dtype == torch.int32 and (begin <= end).all()
    assert (begin[0] == 0).all() and torch.equal(begin[1:], end[:-1])
    assert torch.equal(end[-1], (plan[:, 1] + TILE - 1) // TILE)
    tokens = slot_tokens(plan, p.pools, size, -(-(40 * size + size) // TILE) * TILE)
    tile = torch.arange(tokens.shape[1]) // TILE
    for number in range(len(cuts)):
        low, high = number * range_tokens, (number + 1) * range_tokens
        mine = (tile >= begin[number, :, None]) & (tile < end[number, :, None]) & (tokens >= 0)
        outside = mine & ((tokens < low) | (tokens >= high))
        # Half a tile at either end, and the pool that lies across an edge.
        assert (outside & (tokens < low)).sum(1).max() <= TILE // 2 + size
        assert (outside & (tokens >= high)).sum(1).max() <= TILE // 2 + 2 * size
        assert (begin[number] == end[number])[p.start + p.position < low - size].all()


def test_launches_that_hold_nothing_of_a_query_have_no_tile_of_it() -> None:
    position = torch.tensor([2**17 - 1, 4095])
    pools = torch.stack([torch.arange(512) * 64, torch.arange(512) * 2]).int()
    plan = row_plan(pools, position, torch.zeros_like(position), 4)
    tiles = range_tiles(plan, pools, 4, 2**17, 2**14)
    assert (tiles[:, 0, 1] - tiles[:, 0, 0]).tolist() == [4] * 8
    assert (tiles[:, 1, 1] - tiles[:, 1, 0]).tolist() == [32] + [0] * 7


def test_ranges_of_documents_beyond_two_to_the_thirty() -> None:
    start, tokens = 2**31 - 2**16, 2**31 - 1
    position, pools = torch.tensor([2**16 - 2]), torch.arange(64, dtype=torch.int32).unsqueeze(0)
    plan = row_plan(pools * 256, position, torch.tensor([start]), 4)
    tiles = range_tiles(plan, pools * 256, 4, tokens, 2**30)
    assert tiles.tolist() == [[[0, 0]], [[0, 5]]]


def test_one_launch_writes_to_dq_itself() -> None:
    calls: list[tuple[Any, ...]] = []
    given = [torch.zeros(3, 4) for _ in range(10)]
    given[4] = torch.zeros(3, 4, dtype=torch.int32)
    launch(lambda *arguments: calls.append(arguments), 0, 4, *given)
    assert len(calls) == 1 and calls[0][7] is given[7]
    assert calls[0][11].dtype == torch.int32 and calls[0][11].tolist() == [0]


def test_few_keys_are_walked_through_in_order() -> None:
    assert tuned.walk_of(8192) == Walk()
    assert tuned.walk_of(131_072) != Walk()


def test_walks_that_are_not_legal_are_named() -> None:
    with pytest.raises(ValueError, match="range_tokens=-1, legal: 0 or more"):
        Walk(range_tokens=-1)
    p = draw_inputs((4,), heads=64, width=256, count=1)
    out, lse = naive.forward_reference(*p[:5], size=4, scale=1.0)
    given = (*p[:5], out, lse, p.grad, torch.zeros(p.latent.shape))
    more: dict[str, Any]
    for more in ({"variant": "simple"}, {"deterministic": True}):
        with pytest.raises(ValueError, match="in_phase=True.*legal is none in the simple variant"):
            backward(*given, size=4, scale=1.0, walk=Walk(in_phase=True), **more)
