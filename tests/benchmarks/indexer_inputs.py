"""What the indexer's benchmark computes on: queries in runs, small integers at the gate."""

from dataclasses import dataclass

import torch

from kernels.dsa.pooling import Pools, find_pools
from tests.benchmarks.case import Size, Stage
from tests.benchmarks.probes import Device

POOL = 4
PARTS = 16
SCALE = 0.125
_GATE_QUERIES = 2048


@dataclass(kw_only=True, slots=True)
class Inputs:
    """Arguments of ``select_pools`` for each run of queries; ``begins`` are their first tokens."""

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    pools: Pools
    begins: list[int]
    run: int
    lengths: tuple[int, ...]
    count: int
    gate: bool


def runs(tokens: int, queries: int) -> tuple[list[int], int]:
    """First tokens of the runs of queries, and queries in each of them."""
    if queries == tokens:
        return [0], tokens
    run, stretch = queries // PARTS, tokens // PARTS
    return [part * stretch + (stretch - run) // 2 for part in range(PARTS)], run


def make_inputs(size: Size, device: Device, seed: int, stage: Stage) -> Inputs:
    """Normal numbers; at the gate small integers, whose scores are exact and often tie.

    The gate takes at most 2,048 queries, for it compares with a choice in float64.
    """
    t, q, h, d, k = (size.shape[key] for key in "TQHDK")
    if stage == "gate":
        q = min(q, _GATE_QUERIES)
    begins, run = runs(t, q)
    dtype = getattr(torch, size.dtype)
    random = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        if stage == "gate":
            return torch.randint(-2, 3, shape, generator=random, device=device, dtype=of)
        return torch.randn(*shape, generator=random, device=device, dtype=of)

    return Inputs(
        queries=draw(run * len(begins), h, d),
        weights=draw(run * len(begins), h, of=torch.float32),
        keys=draw(t // POOL, d),
        pools=find_pools((t,), POOL, torch.device(device)),
        begins=begins,
        run=run,
        lengths=(t,),
        count=k,
        gate=stage == "gate",
    )
