"""Ranks agree about chunks, whatever each of them holds, or all of them say why they cannot."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from components.expert_dispatch.partition import ChunkRule, DisagreementError, agree
from tests.distributed.spawn import run_ranks

pytestmark = pytest.mark.distributed

TOKENS = (25, 8, 1, 0)
CPU = torch.device("cpu")
SETTINGS = {"chunk_tokens": 4, "max_chunks": 5}
OTHERS = {
    "chunk_tokens": (8, "rank 3: chunk_tokens 8, max_chunks 5, membership 'strided'"),
    "max_chunks": (6, "rank 3: chunk_tokens 4, max_chunks 6, membership 'strided'"),
    "membership": ("contiguous", "rank 3: chunk_tokens 4, max_chunks 5, membership 'contiguous'"),
}


def rank_of_four() -> None:
    """Two groups, as expert parallelism makes them, and rules that differ on one rank."""
    # What waits for another rank longer than this has hung.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rule, tokens = ChunkRule(**SETTINGS), TOKENS[rank]

    everyone = agree(rule, tokens, dist.group.WORLD, CPU)
    assert (everyone.chunks, everyone.largest) == (5, 25)
    assert sum(everyone.size(i) for i in range(5)) == tokens
    pair = agree(rule, tokens, pairs[rank // 2], CPU)
    assert (pair.chunks, pair.largest) == [(5, 25), (1, 1)][rank // 2]

    for name, (value, says) in OTHERS.items():
        mine = ChunkRule(**SETTINGS | ({name: value} if rank == 3 else {}))
        with pytest.raises(DisagreementError, match=f"ranks 0, 1, 2: chunk_tokens 4, .*; {says}"):
            agree(mine, tokens, dist.group.WORLD, CPU)
        if rank >= 2:
            with pytest.raises(DisagreementError, match=f"rank 2: chunk_tokens 4, .*; {says}"):
                agree(mine, tokens, pairs[1], CPU)
    others = {"threshold": 1.5} if rank == 3 else {}
    mine, theirs = (
        "chunk_tokens 4, max_chunks 5, membership 'strided'",
        "those of another component",
    )
    says = (theirs, f"{mine}, threshold 1.5") if rank == 3 else (mine, theirs)
    with pytest.raises(DisagreementError, match=f"ranks 0, 1, 2: {says[0]}; rank 3: {says[1]}$"):
        agree(rule, tokens, dist.group.WORLD, CPU, others)
    assert agree(ChunkRule(chunk_tokens=10**30, max_chunks=5), 4, dist.group.WORLD, CPU).chunks == 1
    # Nobody is left behind in a collective: the next one works.
    assert agree(rule, 4, dist.group.WORLD, CPU).chunks == 1
    dist.destroy_process_group()


def test_four_ranks_cut_their_tokens_into_as_many_chunks_or_all_refuse(tmp_path: Path) -> None:
    run_ranks(rank_of_four, 4, tmp_path)
