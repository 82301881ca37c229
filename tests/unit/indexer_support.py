"""Inputs of an indexer whose scores are exact in float32, and what it should choose."""

from dataclasses import dataclass, replace

import torch

from components.models.glm_flash.documents import Documents
from kernels.dsa.pooling import Pools, find_pools
from kernels.indexer.fp8 import in_fp8
from kernels.indexer.windows import GROUP, Window, Workspace

RAGGED = [(1,), (3,), (37,), (1, 4, 3, 9, 64, 2, 5), (130, 7), (65, 1, 1, 66), (2, 1, 3)]
SCALE = 0.25


@dataclass(kw_only=True, slots=True)
class Problem:
    """Arguments of ``select_pools``: small integers, so that scores tie and do not round."""

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    pools: Pools
    position: torch.Tensor
    lengths: tuple[int, ...]
    size: int

    def ranges(self, begin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 ``first`` and ``end`` of the queries, which are tokens from ``begin`` on."""
        first = self.pools.before[begin : begin + len(self.queries)]
        return first.int(), (first + (self.position + 1) // self.size).int()

    def scores(self) -> torch.Tensor:
        """The definition in float64, one head after the other."""
        total = torch.zeros(len(self.queries), len(self.keys), dtype=torch.float64)
        for h in range(self.queries.shape[1]):
            products = self.queries[:, h].cpu().double() @ self.keys.cpu().double().t()
            total += self.weights[:, h].cpu().double()[:, None] * (products * SCALE).clamp(min=0)
        return total


def make_problem(
    lengths: tuple[int, ...],
    *,
    size: int = 4,
    heads: int = 8,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    begin: int = 0,
    stop: int | None = None,
) -> Problem:
    """Queries of the tokens ``begin`` to ``stop`` - 1, keys of all pools."""
    random = torch.Generator().manual_seed(seed)
    stop = sum(lengths) if stop is None else stop
    pools = find_pools(lengths, size, torch.device("cpu"))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=random).to(device)

    return Problem(
        queries=draw(stop - begin, heads, dim).to(dtype),
        weights=draw(stop - begin, heads).float(),
        keys=draw(len(pools.first), dim).to(dtype),
        pools=Pools(*(x.to(device) for x in pools)),
        position=Documents.from_lengths(lengths).position[begin:stop].to(device),
        lengths=lengths,
        size=size,
    )


def assert_scores(
    space: Workspace,
    window: Window,
    want: torch.Tensor,
    ranges: tuple[torch.Tensor, torch.Tensor],
    share: float,
) -> None:
    """A window's scores are those wanted, and the best of each group is its best, to the bit.

    Args:
        want: (Q, P) float64 on the CPU, of the whole batch.
        ranges: see ``Problem.ranges``.
        share: most error, as a share of the largest score.
    """
    (first, end), rows = ranges, slice(window.q0, window.q1)
    pools = torch.arange(window.p0, window.p0 + window.width, device=first.device)
    allowed = (pools >= first[rows, None]) & (pools < end[rows, None])
    found = space.scores.masked_fill(~allowed, float("-inf"))
    here = want[rows, window.p0 : window.p0 + window.width]
    known = allowed[:, : here.shape[1]].cpu()
    error = (found.cpu()[:, : here.shape[1]][known] - here[known]).abs().max()
    assert error < share * here[known].abs().max(), error
    best = found.unflatten(1, (-1, GROUP)).amax(2)
    touched = allowed.unflatten(1, (-1, GROUP)).any(2)
    assert torch.equal(space.best[touched], best[touched])


def choose_by_sorting(
    scores: torch.Tensor, first: torch.Tensor, end: torch.Tensor, count: int
) -> torch.Tensor:
    """Best first, of equals the lowest first; then in order. Scores (Q, P), result int32."""
    chosen = torch.full((len(scores), count), -1, dtype=torch.int32)
    for row, (begin, stop) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        if stop > begin:
            order = scores[row, begin:stop].cpu().sort(descending=True, stable=True).indices
            best = order[:count].sort().values
            chosen[row, : len(best)] = best.int()
    return chosen


def rounded(problem: Problem, rotate: bool = False) -> tuple[Problem, torch.Tensor]:
    """The problem in fp8, where small integers stay what they are, and its keys' factors."""
    queries, weights, keys, factors = in_fp8(problem.queries, problem.weights, problem.keys, rotate)
    return replace(problem, queries=queries, weights=weights, keys=keys), factors
