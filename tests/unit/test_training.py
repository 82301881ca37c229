"""One rank: training runs, continues exactly, and refuses what does not fit."""

import logging
import time
from pathlib import Path

import pytest
import torch
import torchtitan.trainer
from torchtitan.components.checkpointer import CheckpointManager

from components.titan.checkpoint import RunCheckpoints
from components.titan.metrics import GLOSSARY
from components.titan.story import STORY
from tests.training import checkpoint_state, losses, metrics, small_overrides, train, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("uninterrupted")
    train(run, small_overrides(corpus))
    return run


def assert_equal_state(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[name]), name
        elif isinstance(value, dict):
            assert_equal_state(value, right[name])
        else:
            assert value == right[name], name


def test_loss_falls(uninterrupted: Path) -> None:
    history = losses(uninterrupted)
    assert len(history) == 6
    assert history[-1] < history[0] - 0.5


def test_every_scalar_is_in_the_glossary(uninterrupted: Path) -> None:
    written = {name for line in metrics(uninterrupted) for name in line} - {"step"}
    assert written <= GLOSSARY.keys()
    # The rest appears with validation and on GPUs only.
    assert GLOSSARY.keys() - written == {"validation/loss", "speed/mfu_percent"}


def test_resuming_twice_equals_the_uninterrupted_run(
    corpus: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    for steps in (2, 4, 6):
        train(tmp_path, [*small_overrides(corpus), f"training.steps={steps}"])
    assert losses(tmp_path) == losses(uninterrupted)
    assert_equal_state(
        checkpoint_state(tmp_path / "checkpoint/step-6"),
        checkpoint_state(uninterrupted / "checkpoint/step-6"),
    )


def test_a_periodic_checkpoint_continues_as_exactly_as_a_final_one(
    corpus: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    # A crash after step 5 leaves step 3 (interval) as the last complete checkpoint.
    def crash_after_five(trainer) -> None:  # type: ignore[no-untyped-def]
        original = trainer.train_step

        def step(iterator) -> None:  # type: ignore[no-untyped-def]
            if trainer.step == 6:
                raise RuntimeError("power cut")
            original(iterator)

        trainer.train_step = step
        with pytest.raises(RuntimeError, match="power cut"):
            trainer.train()

    overrides = [*small_overrides(corpus), "checkpoint.interval=3"]
    train(tmp_path, overrides, use=crash_after_five)
    assert not (tmp_path / "checkpoint/step-5").exists()
    train(tmp_path, overrides)
    assert losses(tmp_path)[-3:] == losses(uninterrupted)[-3:]


def test_accumulation_equals_the_larger_batch(
    corpus: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    overrides = [*small_overrides(corpus), "training.local_batch_size=1"]
    train(tmp_path, [*overrides, "training.global_batch_size=2"])
    assert losses(tmp_path) == pytest.approx(losses(uninterrupted), rel=2e-3)


@pytest.mark.parametrize(
    "toggle",
    ["components.full_recompute.enabled=true", "components.chunked_loss.enabled=false"],
)
def test_a_component_does_not_change_what_is_learnt(
    toggle: str, corpus: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    train(tmp_path, [*small_overrides(corpus), toggle])
    assert losses(tmp_path) == pytest.approx(losses(uninterrupted), rel=1e-5)


def test_another_models_checkpoint_is_refused_with_its_tensors(
    corpus: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    overrides = [
        *small_overrides(corpus),
        "model.expert_hidden_dim=32",
        f"checkpoint.initial_load_path={uninterrupted}/checkpoint/step-6",
        "checkpoint.initial_load_model_only=true",
    ]
    with pytest.raises(
        ValueError, match=r"belongs to another model \(\d+ tensors differ\)"
    ) as error:
        train(tmp_path, overrides)
    assert "w1_EFD: [4, 64, 64] in the checkpoint, [4, 32, 64] in the model" in str(error.value)
    assert "change checkpoint.initial_load_path" in str(error.value)


def test_a_checkpoint_of_a_model_alone_is_not_continued_with_an_optimizer(
    corpus: Path, tmp_path: Path
) -> None:
    one_step = [*small_overrides(corpus), "training.steps=1"]
    train(tmp_path / "first", [*one_step, "checkpoint.last_save_model_only=true"])
    load = f"checkpoint.initial_load_path={tmp_path}/first/checkpoint/step-1"
    with pytest.raises(ValueError, match="holds a model alone") as error:
        train(tmp_path / "second", [*one_step, load])
    assert "checkpoint.initial_load_model_only=true, which makes" in str(error.value)
    assert "frozen" not in str(error.value)
    train(tmp_path / "third", [*one_step, load, "checkpoint.initial_load_model_only=true"])
    assert len(losses(tmp_path / "third")) == 1


def test_a_remote_checkpoint_is_loaded_without_comparison_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = []
    monkeypatch.setattr(
        CheckpointManager, "dcp_load", lambda self, state, path, *flags: loaded.append(path)
    )
    manager = object.__new__(RunCheckpoints)
    with caplog.at_level(logging.INFO, logger=STORY):
        manager.dcp_load({}, "gs://bucket/step-1", False, False)
        manager.dcp_load({}, "gs://bucket/hf", True, False)
    assert loaded == ["gs://bucket/step-1", "gs://bucket/hf"]
    assert [record.message for record in caplog.records] == [
        "checkpoint: gs://bucket/step-1 is remote; its tensors are not compared"
    ]


def test_other_code_still_sleeps_while_a_test_trains(corpus: Path, tmp_path: Path) -> None:
    stock = torchtitan.trainer.time
    seen = []

    def look(trainer: object) -> None:
        seen.append((torchtitan.trainer.time.sleep(60), time.sleep, stock.sleep))

    real = time.sleep
    train(tmp_path, small_overrides(corpus), use=look)
    assert seen == [(None, real, real)]
    assert torchtitan.trainer.time is stock is time


def test_validation_reports_the_held_out_loss(corpus: Path, tmp_path: Path) -> None:
    overrides = [
        *small_overrides(corpus),
        "training.steps=2",
        "validation.enabled=true",
        "validation.every=2",
        "validation.batches=-1",
    ]
    train(tmp_path, overrides)
    reported = [line for line in metrics(tmp_path) if "validation/loss" in line]
    assert [line["step"] for line in reported] == [1, 2]
    assert reported[1]["validation/loss"] < reported[0]["validation/loss"]
