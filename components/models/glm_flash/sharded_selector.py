"""Choose pools for queries that several ranks hold: each rank scores some, and ids are exchanged.

Blocks of consecutive queries are dealt to the ranks in turn, back and forth: 0 1 2 2 1 0 0 1 2 ...
Neighbouring blocks see almost the same number of pools, so ranks score nearly the same number of
pairs of query and pool, whatever documents a batch holds. Ids of one turn travel while the next
turn is scored.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.indexer import IndexerInputs, PoolSelector
from components.models.glm_flash.share_meter import ShareMeter

Block = tuple[int, int]
"""Rows ``begin`` to ``stop`` - 1 of a call's queries."""

Turn = Sequence[Block | None]
"""What each rank of a group scores at a time, by rank; None: nothing."""


class _Exchange(NamedTuple):
    turn: Turn
    gathered: torch.Tensor
    work: dist.Work


def deal(blocks: Sequence[Block], ranks: int) -> list[Turn]:
    """Deal blocks to ranks, back and forth. The last turn may leave ranks without one."""
    turns: list[Turn] = []
    for number, begin in enumerate(range(0, len(blocks), ranks)):
        hand: list[Block | None] = [*blocks[begin : begin + ranks]]
        hand += [None] * (ranks - len(hand))
        turns.append(hand[::-1] if number % 2 else hand)
    return turns


def choose_in_turns(
    choose: Callable[[int, int], torch.Tensor],
    turns: Sequence[Turn],
    out: torch.Tensor,
    group: dist.ProcessGroup,
    meter: ShareMeter | None = None,
) -> torch.Tensor:
    """Fill ``out`` with what all ranks of ``group`` choose together.

    Collective: every rank calls it with the same ``turns`` and shapes. Memory beside ``out``: the
    ids of two turns. A turn's ids travel padded to its largest block.

    Args:
        choose: (begin, stop) -> int32 (stop - begin, n), called for this rank's blocks alone.
        turns: cover every row of ``out`` once.
        out: int32 (Q, n).
        meter: is told what is scored and received.

    Returns:
        ``out``.
    """
    me, pending = dist.get_rank(group), None
    for turn in turns:
        mine = turn[me]
        most = max(block[1] - block[0] for block in turn if block is not None)
        ids = out.new_full((most, out.shape[1]), -1)
        if mine is not None:
            with meter.scoring() if meter else nullcontext():
                ids[: mine[1] - mine[0]] = choose(*mine)
        gathered = out.new_empty(len(turn) * most, out.shape[1])
        work = dist.all_gather_single(gathered, ids, group, async_op=True)
        assert work is not None
        if meter:
            meter.received(gathered.nbytes - ids.nbytes)
        _put(pending, out)
        pending = _Exchange(turn, gathered, work)
    _put(pending, out)
    return out


def _put(exchange: _Exchange | None, out: torch.Tensor) -> None:
    if exchange is None:
        return
    exchange.work.wait()
    parts = exchange.gathered.chunk(len(exchange.turn))
    for rows, block in zip(parts, exchange.turn, strict=True):
        if block is not None:
            out[slice(*block)] = rows[: block[1] - block[0]]


class ShardedSelector(Module):
    """``PoolSelector`` for queries that all ranks of a group hold. Its choice is the inner one's,
    to the bit: blocks are cut where the inner selector says that nothing depends on the cut.

    Attributes:
        group: the ranks, once the model is parallelised.
        meter: what has been scored and exchanged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inner: PoolSelector.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner = config.inner.build()
        self.group: dist.ProcessGroup | None = None
        self.meter = ShareMeter()

    def forward(self, inputs: IndexerInputs, documents: Documents, begin: int) -> torch.Tensor:
        """See ``PoolSelector.forward``; collective over ``group``."""
        if self.group is None:
            raise RuntimeError("a sharded selector runs before it was given its ranks")
        queries = inputs.queries
        size, count = self.inner.config.kpool, self.inner.count
        width = min(count, max(documents.lengths) // size)
        out = queries.new_empty(len(queries), width, dtype=torch.int32)
        if width == 0:
            return out
        blocks = self.inner.blocks(documents.lengths, begin, begin + len(queries), queries.shape[1])
        turns = deal(blocks, dist.get_world_size(self.group))

        def choose(first: int, stop: int) -> torch.Tensor:
            rows = slice(first, stop)
            some = replace(inputs, queries=queries[rows], weights=inputs.weights[rows])
            return self.inner(some, documents.rows(first, stop), begin + first)

        with self.meter.call(queries.device):
            choose_in_turns(choose, turns, out, self.group, self.meter)
        mine = [turn[dist.get_rank(self.group)] for turn in turns]
        self.meter.pairs(
            _pairs([block for block in mine if block is not None], documents, begin, size),
            _pairs(blocks, documents, begin, size),
        )
        return out


def _pairs(blocks: Sequence[Block], documents: Documents, begin: int, size: int) -> int:
    """Pairs of a query of the blocks and a pool that it may choose; host arithmetic."""
    total, first = 0, 0
    for length in documents.lengths:
        for block in blocks:
            low = max(block[0] + begin, first) - first
            high = min(block[1] + begin, first + length) - first
            if low < high:
                total += _visible(high, size) - _visible(low, size)
        first += length
    return total


def _visible(tokens: int, size: int) -> int:
    """Sum over a document's first ``tokens`` queries of the pools that each may choose."""
    whole, rest = divmod(tokens, size)
    return size * whole * (whole - 1) // 2 + whole * (rest + 1)
