"""Several ranks with AdamW's state on the host: the run without, to the bit, on any layout."""

import os
from pathlib import Path

import pytest
import torch

from components.core.base import Component
from components.titan.trainer import RecipeTrainer
from tests.distributed.spawn import run_ranks
from tests.training import checkpoint_state, losses, metrics, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

NAME = "components.offload_stream_adamw"
ON = [f"{NAME}.enabled=true", f"{NAME}.split=0.5", f"{NAME}.bucket_parameters=5000"]
EXPERTS = "parallelism.expert_parallel_degree=2"
HYBRID = [
    "parallelism.data_parallel_replicate_degree=2",
    "parallelism.data_parallel_shard_degree=2",
]


def settings(corpus: str, steps: int, *extra: str) -> list[str]:
    """The vocabulary does not divide: the last rank's shard of its matrices is shorter."""
    return [
        *small_overrides(Path(corpus)),
        "model.vocab_size=323",
        "training.mixed_precision_param=bfloat16",
        "training.local_batch_size=1",
        "training.global_batch_size=4",
        "checkpoint.interval=2",
        f"training.steps={steps}",
        *extra,
    ]


class Spoiler(Component):
    """Makes one number of the last rank's gradients infinite in step 5."""

    name = "spoiler"
    summary = "breaks a gradient"

    def after_microbatch(self, trainer: RecipeTrainer) -> None:
        if trainer.step == 5 and int(os.environ["RANK"]) == 1:
            weight = trainer.model_parts[0].get_parameter("layers.0.attention.wo.weight")
            weight.grad.to_local()[0, 0] = float("inf")


def train_rank(run: str, overrides: list[str]) -> None:
    """One rank of a run that starts, or goes on."""
    train(Path(run), overrides)


def skipping_rank(run: str, overrides: list[str]) -> None:
    """One rank of a run in which one rank has a gradient that is not finite."""
    spoiler = Spoiler(Component.Config(enabled=True))
    train(Path(run), overrides, components=[spoiler])


def reload_rank(run: str, overrides: list[str]) -> None:
    """One rank that loads the latest checkpoint, looks at the weights and writes it anew."""

    def use(trainer: RecipeTrainer) -> None:
        assert trainer.checkpointer.load()
        for weight, master in trainer.optimizers.masters.items():
            assert torch.equal(weight.to_local(), master.to_local().to(weight.dtype))
        trainer.checkpointer.folder = f"{run}/again"
        trainer.checkpointer.save_now(trainer.step)

    train(Path(run), overrides, use=use)


def continued(source: Path, step: int, run: Path) -> str:
    """A run directory whose latest checkpoint is another run's."""
    (run / "checkpoint").mkdir(parents=True)
    (run / f"checkpoint/step-{step}").symlink_to(source / f"checkpoint/step-{step}")
    return str(run)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = checkpoint_state(checkpoint)
    found = {**state, **{f"optimizer.{n}": value for n, value in state["optimizer"].items()}}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def assert_same_tensors(left: Path, right: Path) -> None:
    first, second = tensors(left), tensors(right)
    assert first.keys() == second.keys()
    assert any(name.endswith("exp_avg") for name in first)
    for name, value in first.items():
        assert value.dtype == second[name].dtype and torch.equal(value, second[name]), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and two ranks trained without for four steps."""
    out = tmp_path_factory.mktemp("streamed")
    write_corpus(out / "corpus")
    overrides = settings(str(out / "corpus"), 4, EXPERTS)
    run_ranks(train_rank, 2, out / "errors", str(out / "stock"), overrides)
    return out


@pytest.fixture(scope="module")
def streamed(folder: Path) -> Path:
    """The same from step 2 on, streamed; one rank has a broken gradient in step 5."""
    run = continued(folder / "stock", 2, folder / "streamed")
    extra = [EXPERTS, *ON, f"{NAME}.nonfinite=skip"]
    run_ranks(skipping_rank, 2, folder / "errors", run, settings(str(folder / "corpus"), 5, *extra))
    return Path(run)


def test_two_ranks_go_on_from_a_stock_checkpoint_to_the_bit(folder: Path, streamed: Path) -> None:
    assert losses(streamed)[:2] == losses(folder / "stock")[2:]
    assert_same_tensors(streamed / "checkpoint/step-4", folder / "stock/checkpoint/step-4")


def test_a_gradient_broken_on_one_rank_is_a_step_left_out_by_all(streamed: Path) -> None:
    assert [line["optimizer/skipped_steps"] for line in metrics(streamed)] == [0, 0, 1]
    assert_same_tensors(streamed / "checkpoint/step-5", streamed / "checkpoint/step-4")


@pytest.mark.slow
def test_one_rank_takes_over_what_two_wrote(folder: Path) -> None:
    run = continued(folder / "stock", 2, folder / "one")
    reload_rank(run, settings(str(folder / "corpus"), 4, *ON))
    assert_same_tensors(Path(run) / "again/step-2", folder / "stock/checkpoint/step-2")


@pytest.mark.slow
def test_four_ranks_take_over_what_two_wrote(folder: Path) -> None:
    run = continued(folder / "stock", 2, folder / "four")
    overrides = settings(str(folder / "corpus"), 4, EXPERTS, *ON)
    run_ranks(reload_rank, 4, folder / "errors", run, overrides)
    assert_same_tensors(Path(run) / "again/step-2", folder / "stock/checkpoint/step-2")


@pytest.mark.slow
def test_replicas_of_shards_go_on_to_the_bit(folder: Path) -> None:
    for name, extra in (("hybrid_off", []), ("hybrid_on", ON)):
        run = continued(folder / "stock", 2, folder / name)
        overrides = settings(str(folder / "corpus"), 4, *HYBRID, *extra)
        run_ranks(train_rank, 4, folder / "errors", run, overrides)
    assert losses(folder / "hybrid_on") == losses(folder / "hybrid_off")
    left, right = (folder / name / "checkpoint/step-4" for name in ("hybrid_on", "hybrid_off"))
    assert_same_tensors(left, right)
