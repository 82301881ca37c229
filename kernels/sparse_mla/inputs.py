"""Inputs to check and time the kernels on: packed documents, random pools, gradients."""

from typing import NamedTuple

import torch

from kernels.packed import bounds


class Inputs(NamedTuple):
    """Arguments in the order of ``kernels.sparse_mla.naive.backward_reference``."""

    q: torch.Tensor
    latent: torch.Tensor
    pools: torch.Tensor
    position: torch.Tensor
    start: torch.Tensor
    grad: torch.Tensor

    def rows(self, some: slice) -> "Inputs":
        """The same keys, some of the queries."""
        q, latent, pools, position, start, grad = self
        return Inputs(q[some], latent, pools[some], position[some], start[some], grad[some])

    def cast(self, dtype: torch.dtype) -> "Inputs":
        q, latent, pools, position, start, grad = self
        return Inputs(q.to(dtype), latent.to(dtype), pools, position, start, grad.to(dtype))


def packed_positions(lengths: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 (T,) positions in the documents, and their documents' starts."""
    starts = bounds(lengths)[:-1]
    position = torch.cat([torch.arange(length) for length in lengths])
    start = torch.cat([torch.full((n,), begin) for n, begin in zip(lengths, starts, strict=True)])
    return position.to(device), start.to(device)


def spread_pools(
    position: torch.Tensor, count: int, size: int, random: torch.Generator
) -> torch.Tensor:
    """int32 (Q, count): all complete pools, or ``count`` of them spread at random; ascending."""
    complete = ((position + 1) // size).unsqueeze(1)
    slot = torch.arange(count, device=position.device).unsqueeze(0)
    noise = torch.rand(len(position), count, generator=random, device=position.device)
    # One out of each of ``count`` ranges of pools: ascending and without repetition.
    begin, end = slot * complete // count, (slot + 1) * complete // count
    spread = begin + (noise * (end - begin)).long().clamp(max=(end - begin - 1).clamp(min=0))
    chosen = torch.where(complete > count, spread, torch.where(slot < complete, slot, -1))
    return chosen.int()


def draw_inputs(
    lengths: tuple[int, ...],
    *,
    heads: int = 64,
    width: int = 512,
    tail: int = 0,
    count: int = 512,
    size: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    drop: float = 0.0,
) -> Inputs:
    """Random inputs, one query per token of the documents.

    Args:
        lengths: tokens of the documents.
        heads, width, tail, size: see ``kernels.sparse_mla.shape.Shape``.
        count: pools per query, at most.
        drop: share of the queries that lose all pools.
    """
    random = torch.Generator(device=device).manual_seed(seed)
    position, start = packed_positions(lengths, device)
    pools = spread_pools(position, count, size, random)
    tokens = len(position)
    lost = torch.rand(tokens, generator=random, device=device) < drop
    pools[lost] = -1

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device).to(dtype)

    return Inputs(
        draw(tokens, heads, width + tail),
        draw(tokens, width + tail),
        pools,
        position,
        start,
        draw(tokens, heads, width),
    )
