"""In what order backward walks through the tiles of keys, where their gradient exceeds L2.

Every tile adds 64 rows of float32 to the gradient of the latents, 2 KiB a row at 512 columns. In L2
that is cheap. Rows that are not there are read and written back: with 131,072 tokens the gradient
is 256 MiB, an H200's L2 is 50 MiB, and blocks that are at different places of their walks miss most
of the time. Two remedies, which go together:

* in phase: a block begins where the blocks beside it are on average, and wraps around. Pools
  ascend, so all blocks meet the same part of the keys at the same time. It takes one more atomic
  addition per tile, of an integer; but the order in which a query's tiles are added to dQ depends
  on the moment, so dQ differs from run to run by rounding, as the latents' gradient always does.
* ranges: one launch per range of keys. Every launch loads queries and gradients of outputs again,
  and dQ is added up in float32 in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.sparse_mla.shape import TILE


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """How backward walks; as written here, each block from its first tile to its last.

    Attributes:
        in_phase: blocks begin where the others are.
        range_tokens: keys of a launch, in tokens; 0: all of them in one.
    """

    in_phase: bool = False
    range_tokens: int = 0

    def __post_init__(self) -> None:
        if self.range_tokens < 0:
            raise ValueError(f"sparse_mla: range_tokens={self.range_tokens}, legal: 0 or more")


def range_tiles(
    plan: torch.Tensor, pools: torch.Tensor, size: int, tokens: int, range_tokens: int
) -> torch.Tensor:
    """Which tiles of each query lie in which range of keys.

    Queries are cut between tiles, at the nearest to the range's end, so that no tile is computed
    twice: up to half a tile of keys lies in a neighbouring range. A query's unfinished pool belongs
    to the range that holds it; so a query has no tile in a range that begins after it.

    Args:
        plan: int32 (Q, 4), from ``kernels.sparse_mla.plan.row_plan``.
        pools: int32 (Q, n), ascending, then -1; n >= 1.
        size: tokens per pool.
        tokens: of the latent.
        range_tokens: keys of a range, 1 or more.

    Returns:
        int32 (ranges, Q, 2): first tile, and the one after the last. Equal where there is none.
    """
    used, count, start, unfinished = plan.unbind(1)
    tiles = (count + TILE - 1) // TILE
    edges = torch.arange(range_tokens, max(tokens, range_tokens), range_tokens, device=plan.device)
    # A pool begins before the edge if its number is below this.
    bound = (edges - start.unsqueeze(1) + size - 1).div(size, rounding_mode="floor")
    ascending = torch.where(pools >= 0, pools, torch.iinfo(torch.int32).max)
    before = torch.searchsorted(ascending, bound.clamp(min=0).int(), out_int32=True)
    groups = TILE // size
    nearest = torch.minimum((before + groups // 2) // groups, tiles.unsqueeze(1))
    cuts = torch.where(unfinished.unsqueeze(1) < edges, tiles.unsqueeze(1), nearest)
    first, last = torch.zeros_like(tiles).unsqueeze(1), tiles.unsqueeze(1)
    begin, end = torch.cat([first, cuts], 1), torch.cat([cuts, last], 1)
    return torch.stack([begin, end], 2).int().transpose(0, 1).contiguous()


def launch(
    kernel: Callable[..., None], range_tokens: int, size: int, *arguments: torch.Tensor
) -> None:
    """Call the split kernel with the simple one's arguments: once, or once per range of keys.

    Args:
        kernel: takes, besides, the tiles of each query, int32 (Q, 2), and a clock, int32 (1,).
            Where there are ranges it must be one that adds to a float32 dq.
        range_tokens: as in ``Walk``.
        size: tokens per pool.
        arguments: q, grad, latent, pools, plan, lse, delta, dq, dlatent, mass.
    """
    *inputs, dq, dlatent, mass = arguments
    latent, pools, plan = inputs[2:5]
    tiles, into = plan.new_zeros(1, 1, 2), dq
    if range_tokens:
        tiles = range_tiles(plan, pools, size, len(latent), range_tokens)
        into = torch.zeros_like(dq, dtype=torch.float32)
    for some, clock in zip(tiles, plan.new_zeros(len(tiles), 1), strict=True):
        kernel(*inputs, into, dlatent, mass, some, clock)
    if range_tokens:
        dq.copy_(into)
