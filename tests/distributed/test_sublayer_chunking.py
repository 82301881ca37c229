"""Two ranks train GLM-5.3-Flash in chunks as one rank trains it whole: FSDP2, accumulation.

Chunks run inside one autograd function, without FSDP's hooks; gradients must still arrive whole,
and be reduced once.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.test_glm_parallel import assert_as_one, overrides, single_run, train_and_keep
from tests.training import losses, train

pytestmark = pytest.mark.distributed

CHUNKS = [
    "components.sublayer_chunking.enabled=true",
    "components.sublayer_chunking.chunk_tokens=64",
    "components.sublayer_chunking.shared_expert=true",
]
RECOMPUTE = ["components.layer_recompute.enabled=true"]
STREAMS = [
    "components.precision_trimming.enabled=true",
    "components.sublayer_chunking.streams=true",
]
EXPERTS = ["parallelism.expert_parallel_degree=2"]
LAYOUTS = {
    "fsdp2": CHUNKS,
    "fsdp2_ep2_recompute": [*CHUNKS, *STREAMS, *EXPERTS, *RECOMPUTE],
    "fsdp2_recompute_by_two": [
        *CHUNKS,
        *STREAMS,
        *RECOMPUTE,
        "components.layer_recompute.every=2",
        "components.layer_recompute.keep_sublayers=true",
    ],
    "fsdp2_gathered_for_both_passes": [*CHUNKS, "parallelism.fsdp_reshard_after_forward=never"],
}


def train_layout(layout: str, corpus: str, seed: str, out: str) -> None:
    """One rank of a layout's run."""
    settings = [*overrides(corpus, seed), *LAYOUTS[layout]]
    kept = train(Path(out) / layout, settings, use=train_and_keep)
    torch.save(kept, Path(out) / f"{layout}.{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, whole; and the seed that all start from."""
    return single_run(tmp_path_factory.mktemp("glm_chunks"), starve_rank_1=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_in_chunks_equal_one_rank_whole(layout: str, single: Path) -> None:
    seed = str(single / "seed/checkpoint/step-0")
    arguments = layout, str(single / "corpus"), seed, str(single)
    run_ranks(train_layout, 2, single / f"{layout}_errors", *arguments)
    ranks = [torch.load(single / f"{layout}.{rank}.pt") for rank in range(2)]
    assert_as_one(single, layout, ranks)
    for name, gradient in ranks[0]["gradients"].items():
        assert torch.equal(gradient, ranks[1]["gradients"][name]), name


def test_one_rank_in_chunks_equals_one_rank_whole(single: Path) -> None:
    seed = str(single / "seed/checkpoint/step-0")
    settings = [*overrides(str(single / "corpus"), seed), *CHUNKS]
    kept = train(single / "one_in_chunks", settings, use=train_and_keep)
    expected = torch.load(single / "single.pt")
    assert kept["without"] == expected["without"]
    for name, gradient in expected["gradients"].items():
        error = (kept["gradients"][name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-5, f"{name}: {error:.2e}"
    whole, chunked = losses(single / "single"), losses(single / "one_in_chunks")
    assert chunked == pytest.approx(whole, rel=1e-3)
    assert chunked[0] == pytest.approx(whole[0], rel=1e-6)
