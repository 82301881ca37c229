"""Ranks that share the scoring of pools choose what one rank chooses alone, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.models.glm_flash import sparse_kernels
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.fp8_selector import Fp8Selector
from components.models.glm_flash.indexer import IndexerInputs
from components.models.glm_flash.sharded_selector import ShardedSelector, choose_in_turns, deal
from components.recompute.layer import RecomputedLayer
from kernels.backends.ops import INDEXER
from kernels.dsa import select
from tests.distributed.spawn import run_ranks
from tests.unit.absorbed_support import Sorting
from tests.unit.chunked_support import build, config_of, draw, gradients, runner
from tests.unit.test_chunked_parts import Wrapped

pytestmark = pytest.mark.distributed

RAGGED = [(1,), (3,), (4,), (37,), (1, 4, 3, 9, 64, 2, 5), (130, 7), (65, 1, 1, 66), (700, 300)]


def test_shared_scoring(tmp_path: Path) -> None:
    run_ranks(share, 2, tmp_path)


def share() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    select._SCORE_BYTES = 60_000
    sparse_kernels._BLOCK = 16
    INDEXER.loaded["triton"] = Sorting()
    for lengths in RAGGED:
        check_choice(lengths, group, torch.float32)
    check_choice((130, 70), group, torch.bfloat16)
    check_fp8(group)
    check_empty_shards(group)
    check_layers(group)
    dist.destroy_process_group()


def selectors(kernel: bool, group: dist.ProcessGroup) -> tuple[Any, ShardedSelector]:
    config = config_of("dsa").indexer.selector
    if kernel:
        config = sparse_kernels.triton_indexer(config)
    sharded = ShardedSelector.Config(inner=config).build()
    sharded.group = group
    return config.build(), sharded


def check_choice(lengths: tuple[int, ...], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    documents, total = Documents.from_lengths(lengths), sum(lengths)
    pools = documents.pools(4)
    low = torch.Generator().manual_seed(0)
    # Few distinct values, so that many scores tie.
    q, w, k = (
        torch.randint(-2, 3, shape, generator=low).to(kind) / 2
        for shape, kind in (
            ((total, 2, 8), dtype), ((total, 2), torch.float32), ((len(pools.first), 8), dtype),
        )
    )  # fmt: skip
    inputs = IndexerInputs(q + 1e-3 * torch.randn(q.shape, generator=low).to(dtype), w, k, pools)
    for kernel in (False, True):
        alone, sharded = selectors(kernel, group)
        expected = alone(inputs, documents, 0)
        assert torch.equal(sharded(inputs, documents, 0), expected), (lengths, kernel)
        if expected.shape[1]:
            check_meter(sharded, total, expected)
        # A piece of the batch, as in chunks of queries.
        begin = total // 3
        piece = IndexerInputs(inputs.queries[begin:], w[begin:], k, pools)
        asking = documents.rows(begin, total)
        wanted = alone(piece, asking, begin)
        assert torch.equal(sharded(piece, asking, begin), wanted), (lengths, kernel, begin)


def check_fp8(group: dist.ProcessGroup) -> None:
    """Rounded first, then shared: rows are rounded by themselves."""
    documents, low = Documents.from_lengths((130, 70)), torch.Generator().manual_seed(0)
    pools = documents.pools(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=low)

    inputs = IndexerInputs(draw(200, 2, 8), draw(200, 2), draw(len(pools.first), 8), pools)
    chosen = []
    for kernel in (False, True):
        for inner in selectors(kernel, group):
            made = Fp8Selector.Config(
                inner=config_of("dsa").indexer.selector,
                count=4, kpool=4, scale=0.25, rotate=True, compared=50,
            ).build()  # fmt: skip
            made.inner = inner
            chosen.append((made(inputs, documents, 0), made.found, made.wanted))
    assert chosen[0][2] is not None and 0 < chosen[0][1] <= chosen[0][2]
    for ids, found, wanted in chosen[1:]:
        assert torch.equal(ids, chosen[0][0]) and (found, wanted) == chosen[0][1:]


def check_meter(sharded: ShardedSelector, total: int, chosen: torch.Tensor) -> None:
    meter = sharded.meter
    # Of every turn the other's part: at least half of its rows.
    assert meter.nbytes >= 4 * chosen.shape[1] * (total // 2)
    counts = torch.tensor([meter._mine])
    dist.all_reduce(counts)
    assert counts.item() == meter._all
    if total >= 1000:
        # Two ranks have about half each.
        assert 0.45 < meter._mine / meter._all < 0.55
    sharded.meter.reset()


def check_empty_shards(group: dist.ProcessGroup) -> None:
    """One block for two ranks, and a turn that is not dealt back and forth."""
    rank, asked = dist.get_rank(group), []

    def choose(begin: int, stop: int) -> torch.Tensor:
        asked.append((begin, stop))
        return torch.arange(begin, stop, dtype=torch.int32).view(-1, 1)

    for blocks in ([(0, 3)], [(0, 3), (3, 4)], [(0, 2), (2, 7), (7, 8)]):
        out = torch.full((blocks[-1][1], 1), 99, dtype=torch.int32)
        choose_in_turns(choose, deal(blocks, 2), out, group)
        assert out.flatten().tolist() == list(range(blocks[-1][1]))
    mine = {0: [(0, 3), (0, 3), (0, 2)], 1: [(3, 4), (2, 7), (7, 8)]}
    assert asked == mine[rank]


def check_layers(group: dist.ProcessGroup) -> None:
    """Mixers, whole and in chunks, recomputed or not: the same gradients, and one exchange."""
    lengths = (130, 70)
    for chunk in (None, 64):
        plain = build(config_of("dsa", chunk))
        config = config_of("dsa", chunk)
        config.indexer.selector = ShardedSelector.Config(inner=config.indexer.selector)
        sharded = build(config)
        sharded.indexer.selector.group = group
        expected = gradients(plain, runner(plain, lengths), draw(200))
        found = gradients(sharded, runner(sharded, lengths), draw(200))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        once = sharded.indexer.selector.meter.nbytes
        assert once > 0
        sharded.indexer.selector.meter.reset()
        layer = RecomputedLayer(Wrapped(runner(sharded, lengths)))
        gradients(sharded, layer, draw(200))
        assert sharded.indexer.selector.meter.nbytes == once
