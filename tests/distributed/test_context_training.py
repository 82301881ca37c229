"""Whole trainings of GLM-5.3-Flash whose batches are cut over context ranks, against one rank."""

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.test_glm_parallel import assert_as_one, overrides, single_run, train_and_keep
from tests.training import losses, metrics, train

pytestmark = pytest.mark.distributed

ON = ["components.context_parallel.enabled=true"]
DEGREE = "parallelism.context_parallel_degree"
EXPERTS = "parallelism.expert_parallel_degree"
LAYOUTS = {
    "cp2": (2, [f"{DEGREE}=2"]),
}


def train_layout(layout: str, corpus: str, seed: str, out: str) -> None:
    """One rank of a layout's run."""
    settings = [*overrides(corpus, seed), *ON, *LAYOUTS[layout][1]]
    kept = train(Path(out) / layout, settings, use=train_and_keep)
    torch.save(kept, Path(out) / f"{layout}.{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, whole; and the seed that all start from."""
    return single_run(tmp_path_factory.mktemp("context"), starve_rank_1=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_context_ranks_train_as_one_rank(layout: str, single: Path) -> None:
    ranks, _ = LAYOUTS[layout]
    seed = str(single / "seed/checkpoint/step-0")
    arguments = layout, str(single / "corpus"), seed, str(single)
    run_ranks(train_layout, ranks, single / f"{layout}_errors", *arguments)
    kept = [torch.load(single / f"{layout}.{rank}.pt") for rank in range(ranks)]
    assert_as_one(single, layout, kept)
