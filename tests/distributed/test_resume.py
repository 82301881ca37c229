"""Two ranks continue exactly, and another number of ranks continues from the same place."""

from pathlib import Path

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.training import checkpoint_state, losses, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

EXPERT_PARALLEL = "parallelism.expert_parallel_degree=2"


def train_to(corpus: str, run: str, steps: int) -> None:
    """One rank of a run that ends (or goes on and ends) at ``steps``."""
    settings = [*small_overrides(Path(corpus)), EXPERT_PARALLEL, f"training.steps={steps}"]
    train(Path(run), settings)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("resume")
    corpus = str(write_corpus(out / "corpus"))
    for run, steps in (("whole", 6), ("parts", 2), ("parts", 4), ("parts", 6)):
        run_ranks(train_to, 2, out / "errors", corpus, str(out / run), steps)
    return out


def test_resuming_twice_is_bitwise_equal(results: Path) -> None:
    assert losses(results / "parts") == losses(results / "whole")
    left = checkpoint_state(results / "whole/checkpoint/step-6")
    right = checkpoint_state(results / "parts/checkpoint/step-6")
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[name]), name


def test_data_position_is_the_same_on_both(results: Path) -> None:
    left = checkpoint_state(results / "whole/checkpoint/step-6")
    right = checkpoint_state(results / "parts/checkpoint/step-6")
    positions = {name: value for name, value in left.items() if name.startswith("dataloader")}
    assert positions
    for name, value in positions.items():
        assert right[name] == value, name


def test_one_rank_continues_a_two_rank_run_on_the_same_samples(results: Path) -> None:
    run = results / "one_rank"
    (run / "checkpoint").mkdir(parents=True)
    # Step 4 of the interrupted run, continued by one rank with both ranks' samples per step.
    (run / "checkpoint/step-4").symlink_to(results / "parts/checkpoint/step-4")
    train(run, [*small_overrides(results / "corpus"), "training.local_batch_size=4"])
    assert losses(run) == pytest.approx(losses(results / "whole")[4:], rel=2e-3)
