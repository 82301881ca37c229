"""Two ranks offload the same boundaries, and refuse together."""

import os
from pathlib import Path

import pytest
import torch

from components.offload import claim as claiming
from components.offload.slabs import PinningRefused
from components.selective_checkpoint_offload import SelectiveCheckpointOffload
from components.titan.trainer import RecipeTrainer
from tests.distributed.spawn import run_ranks
from tests.training import losses, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

NAME = "components.selective_checkpoint_offload"
RECOMPUTE = "components.layer_recompute.enabled=true"
ONE = 2 * 128 * 64 * 4 / 2**30
"""GiB of a boundary of the tiny model: 2 sequences of 128 tokens, 64 wide, in float32."""


def settings(corpus: str) -> list[str]:
    small = [o for o in small_overrides(Path(corpus)) if not o.startswith("model=")]
    return [
        "model=moe_debug",
        *small,
        RECOMPUTE,
        "components.precision_trimming.enabled=false",
        "parallelism.expert_parallel_degree=2",
        "training.global_batch_size=8",
        "training.steps=2",
        "checkpoint.enable=false",
    ]


def train_rank(name: str, corpus: str, extra: list[str], out: str) -> None:
    """One rank; what its engine decided."""
    rank = int(os.environ["RANK"])

    def use(trainer: RecipeTrainer) -> list[tuple]:
        decided = []
        (component,) = [c for c in trainer.enabled if isinstance(c, SelectiveCheckpointOffload)]
        step = trainer.train_step

        def and_note(iterator: object) -> None:
            step(iterator)
            counts = component.counts
            decided.append((counts.offloaded, dict(counts.left), counts.nbytes))

        trainer.train_step = and_note
        trainer.train()
        return decided

    decided = train(Path(out) / name, [*settings(corpus), *extra], use=use)
    torch.save(decided, Path(out) / f"{name}.{rank}.pt")


def train_without(name: str, corpus: str, out: str) -> None:
    train(Path(out) / name, settings(corpus))


def refused_rank(corpus: str, out: str) -> None:
    """Rank 1 is not allowed to pin; both must say so instead of one waiting for the other."""
    rank = int(os.environ["RANK"])

    def refuse(*arguments: object) -> None:
        raise PinningRefused("the system refused to pin 5.00 GiB of host memory: error 2")

    if rank == 1:
        claiming.Slab = refuse
    with pytest.raises(PinningRefused) as refusal:
        train(Path(out) / "refused", [*settings(corpus), f"{NAME}.enabled=true"])
    (Path(out) / f"refused.{rank}").write_text(str(refusal.value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    write_corpus(folder / "corpus")
    run_ranks(train_without, 2, folder / "errors", "without", str(folder / "corpus"), str(folder))
    return folder


@pytest.mark.parametrize(
    ("budget", "sent"),
    [pytest.param("null", 2, marks=pytest.mark.slow), (f"{1.5 * ONE}", 1)],
)
def test_ranks_decide_alike_and_learn_the_same(budget: str, sent: int, folder: Path) -> None:
    name = f"budget_{sent}"
    extra = [f"{NAME}.enabled=true", f"{NAME}.streams=true", f"{NAME}.host_budget_gib={budget}"]
    run_ranks(train_rank, 2, folder / "errors", name, str(folder / "corpus"), extra, str(folder))
    first, second = (torch.load(folder / f"{name}.{rank}.pt") for rank in range(2))
    assert first == second
    passes = 2
    for offloaded, left, nbytes in first:
        assert offloaded == passes * sent
        assert left == ({"not chosen": passes * (2 - sent)} if sent < 2 else {})
        assert nbytes == passes * sent * ONE * 2**30
    assert losses(folder / name) == losses(folder / "without")


def test_one_rank_that_may_not_pin_stops_all_with_the_figures(folder: Path) -> None:
    run_ranks(refused_rank, 2, folder / "errors", str(folder / "corpus"), str(folder))
    texts = [(folder / f"refused.{rank}").read_text() for rank in range(2)]
    assert texts[0] == texts[1]
    assert f"{NAME}.host_budget_gib: on rank 1 the system refused to pin 5.00 GiB" in texts[0]
