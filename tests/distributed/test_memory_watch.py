"""On two ranks: the leak guard tells FSDP's buffers from leaks, and the first rank is drawn."""

from pathlib import Path

import pytest

from tests.distributed.spawn import run_ranks
from tests.training import losses, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "fsdp2": ["parallelism.expert_parallel_degree=1"],
    "fsdp2_ep2": ["parallelism.expert_parallel_degree=2"],
    "tensor2": ["parallelism.tensor_parallel_degree=2"],
}
WATCHED = ["debug.leak_guard=true", "debug.memory_timeline=2"]


def run(run_dir: str, settings: list[str]) -> None:
    train(Path(run_dir), settings)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        pytest.param("fsdp2_ep2", "true", marks=pytest.mark.slow),
        pytest.param("fsdp2", "false", marks=pytest.mark.slow),
        pytest.param("tensor2", "true", marks=pytest.mark.slow),
    ],
)
def test_sharded_models_pass_and_only_the_first_rank_is_drawn(
    layout: str, recompute: str, tmp_path: Path
) -> None:
    settings = [
        *small_overrides(write_corpus(tmp_path / "corpus")),
        *LAYOUTS[layout],
        f"components.full_recompute.enabled={recompute}",
        "parallelism.fsdp_reshard_after_forward=always",
        "training.global_batch_size=8",
        "training.steps=2",
        "checkpoint.enable=false",
    ]
    run_ranks(run, 2, tmp_path / "errors", str(tmp_path / "on"), [*settings, *WATCHED])
    words = (tmp_path / "on/memory_timeline.txt").read_text()
    assert "rank 0 of 2" in words.splitlines()[0]
    assert len(list((tmp_path / "on").glob("memory_timeline.*"))) == 3
    if layout == "fsdp2_ep2":
        run_ranks(run, 2, tmp_path / "errors", str(tmp_path / "off"), settings)
        assert losses(tmp_path / "on") == losses(tmp_path / "off")
