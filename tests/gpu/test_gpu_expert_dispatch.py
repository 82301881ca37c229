"""Finding every route's place on a GPU: as on the host, and without waiting for the device."""

import pytest
import torch

from components.expert_dispatch.exchange import Placement, exchange
from components.expert_dispatch.partition import ChunkRule
from components.expert_dispatch.plan import plan
from components.expert_dispatch.profiles import RoutingProfile
from tests.send_tables import send_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS, EXPERTS, TOP_K, TOKENS = 8, 64, 8, 5_000


@pytest.mark.parametrize("profile", ["balanced", "80/16", "50/4"])
def test_places_and_splits_are_those_of_the_host_and_nobody_waits(profile: str) -> None:
    drawn = RoutingProfile.parse(profile)
    ids = drawn.expert_ids(TOKENS, TOP_K, EXPERTS, "cuda")
    assert torch.equal(ids.cpu(), drawn.expert_ids(TOKENS, TOP_K, EXPERTS, "cpu"))
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS).expand(RANKS, EXPERTS).contiguous()
    on_host = counts.cpu()
    made = plan(on_host.sum(0), RANKS)
    splits = exchange(made, on_host).splits
    cut = ChunkRule(chunk_tokens=600, max_chunks=10).cut(TOKENS)
    expected = Placement.of(made, "cpu")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        placement = Placement.of(made, "cuda")
        holdings = [placement.holdings(ids, on_host, rank) for rank in range(RANKS)]
        tables = [send_table(cut, placement.rank[h], RANKS) for h in holdings]
        drawn.expert_ids(TOKENS, TOP_K, EXPERTS, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for rank in range(RANKS):
        mine = expected.holdings(ids.cpu(), on_host, rank)
        assert torch.equal(holdings[rank].cpu(), mine)
        assert torch.equal(tables[rank].cpu(), send_table(cut, expected.rank[mine], RANKS))
        assert torch.equal(tables[rank].sum(0).cpu(), splits[rank])
