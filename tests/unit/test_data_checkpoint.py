"""The loader's position through torch.distributed.checkpoint, on one rank and on two."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.spawn import run_ranks
from tests.unit.test_data_loader import make, take
from tests.unit.test_data_store import given


def test_a_checkpoint_restores_the_position_twice(tmp_path: Path) -> None:
    corpus = given(tmp_path)
    loader = make(corpus, batch=2)
    seen = []
    for save in range(3):
        seen += take(loader, 5)
        dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / f"step-{save}", no_dist=True)
        resumed = make(corpus, batch=2)
        dcp.load({"dataloader": resumed}, checkpoint_id=tmp_path / f"step-{save}", no_dist=True)
        assert resumed.state_dict() == loader.state_dict()
        loader = resumed
    assert seen == take(make(corpus, batch=2), 15)


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    saved = make(given(tmp_path))
    dcp.save({"dataloader": saved}, checkpoint_id=tmp_path / "step", no_dist=True)
    other = make(given(tmp_path, seed=9))
    with pytest.raises(ValueError, match="  data.seed: saved 0, present 9"):
        dcp.load({"dataloader": other}, checkpoint_id=tmp_path / "step", no_dist=True)


def train_on(folder: Path) -> None:
    """Take three steps, save, and do it again with a new loader that resumes."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    taken = []
    for save in range(2):
        loader = make(given(folder), ranks=ranks, rank=rank, batch=2)
        if save:
            dcp.load({"dataloader": loader}, checkpoint_id=folder / f"step-{save - 1}")
        taken += take(loader, 3)
        dcp.save({"dataloader": loader}, checkpoint_id=folder / f"step-{save}")
    (folder / f"rank-{rank}").write_text(repr(taken))
    dist.destroy_process_group()


@pytest.mark.distributed
def test_a_checkpoint_of_two_ranks_continues_on_two_and_on_one(tmp_path: Path) -> None:
    run_ranks(train_on, 2, tmp_path / "errors", tmp_path)
    resumed = make(given(tmp_path), batch=2)
    dcp.load({"dataloader": resumed}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert resumed.sample == 24

    expected = take(make(given(tmp_path)), 36)
    assert take(resumed, 6) == expected[24:]
    for rank in range(2):
        rows = [expected[first + row] for first in range(2 * rank, 24, 4) for row in range(2)]
        assert (tmp_path / f"rank-{rank}").read_text() == repr(rows)
