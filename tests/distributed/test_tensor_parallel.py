"""Whole trainings of GLM-5.3-Flash whose heads and tokens are split over tensor ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.test_glm_parallel import assert_as_one, overrides, single_run, train_and_keep
from tests.training import train

pytestmark = pytest.mark.distributed

DEGREE = "parallelism.tensor_parallel_degree"
EXPERTS = "parallelism.expert_parallel_degree=2"
CONTEXT = ["components.context_parallel.enabled=true", "parallelism.context_parallel_degree=2"]
# Ranks and settings. Ranks beyond the degrees read samples of their own.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, []),
    "tp2_ep2": (2, [EXPERTS]),
    "tp2_indexer": (2, ["components.indexer_sharding.enabled=true"]),
    "cp2_tp2": (4, [*CONTEXT]),
    "cp2_tp2_ep2": (4, [*CONTEXT, EXPERTS, "components.indexer_sharding.enabled=true"]),
}


def train_layout(layout: str, corpus: str, seed: str, out: str) -> None:
    """One rank of a layout's run."""
    _, settings = LAYOUTS[layout]
    settings = [*overrides(corpus, seed), f"{DEGREE}=2", *settings]
    kept = train(Path(out) / layout, settings, use=train_and_keep)
    torch.save(kept, Path(out) / f"{layout}.{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, whole; and the seed that all start from."""
    return single_run(tmp_path_factory.mktemp("tensor"), False)


def split_run(folder: Path, layout: str) -> list[dict[str, Any]]:
    """Train a layout from the folder's seed; what each rank kept."""
    ranks = LAYOUTS[layout][0]
    seed = str(folder / "seed/checkpoint/step-0")
    arguments = layout, str(folder / "corpus"), seed, str(folder)
    run_ranks(train_layout, ranks, folder / f"{layout}_errors", *arguments)
    return [torch.load(folder / f"{layout}.{n}.pt", weights_only=False) for n in range(ranks)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_split(layout: str, single: Path) -> None:
    assert_as_one(single, layout, split_run(single, layout))
