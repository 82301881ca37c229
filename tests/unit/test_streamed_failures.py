"""Trainings with AdamW's state on the host that fail: broken gradients, trainers not built."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from components.core.base import Component
from components.offload.accountant import host_accountant
from components.titan.story import STORY
from components.titan.streamed_optimizer import NonFiniteGradient
from components.titan.trainer import RecipeTrainer
from tests.training import (
    checkpoint_state,
    full,
    losses,
    metrics,
    train,
    write_corpus,
)
from tests.unit.streamed_runs import NAME, ON, settings


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("streamed") / "corpus")


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    yield
    assert NAME not in host_accountant().holdings


@pytest.fixture(scope="module")
def stock(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, a checkpoint every two."""
    run = tmp_path_factory.mktemp("stock")
    train(run, [*settings(corpus, 4), "checkpoint.interval=2"])
    return run


class Spoiler(Component):
    """Puts a number into a gradient of one step."""

    name = "spoiler"
    summary = "breaks a gradient"

    def __init__(self, step: int, value: float) -> None:
        super().__init__(Component.Config(enabled=True))
        self.step, self.value = step, value

    def after_microbatch(self, trainer: RecipeTrainer) -> None:
        if trainer.step == self.step:
            weight = trainer.model_parts[0].get_parameter("layers.0.attention.wo.weight")
            weight.grad._local_tensor.view(-1)[7] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_gradient_ends_the_run_and_changes_nothing(
    value: float, corpus: Path, stock: Path, tmp_path: Path
) -> None:
    def use(trainer: RecipeTrainer) -> None:
        with pytest.raises(NonFiniteGradient, match=rf"{NAME}\.nonfinite: 'raise'.*as before"):
            trainer.train()
        trainer.step = 2
        trainer.checkpointer.save_now(2)

    train(tmp_path, [*settings(corpus, 4), *ON], use=use, components=[Spoiler(3, value)])
    left, right = (checkpoint_state(run / "checkpoint/step-2") for run in (tmp_path, stock))
    for name, value in {**right, **right["optimizer"]}.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal({**left, **left["optimizer"]}[name], value), name


def test_a_broken_step_can_be_left_out(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def use(trainer: RecipeTrainer) -> dict[str, Any]:
        kept: dict[str, Any] = {}

        def note() -> None:
            for module in trainer.model_parts[0].modules():
                counts = getattr(module, "tokens_per_expert_E", None)
                assert counts is None or not counts.any(), "counts would go into the next step"
            state = {**trainer.checkpointer.states["model"].state_dict()}
            state |= trainer.optimizers.state_dict()
            kept[trainer.step] = {k: full(v) for k, v in state.items() if hasattr(v, "clone")}

        step = trainer.train_step

        def and_note(iterator: object) -> None:
            step(iterator)
            note()

        trainer.train_step = and_note
        trainer.train()
        return kept

    overrides = [*settings(corpus, 4), *ON, f"{NAME}.nonfinite=skip", "checkpoint.enable=true"]
    with caplog.at_level(logging.INFO, STORY):
        states = train(tmp_path, overrides, use=use, components=[Spoiler(2, float("nan"))])
    said = [record.getMessage() for record in caplog.records if record.name == STORY]
    (told,) = [line for line in said if "updated nothing" in line]
    assert told.startswith("step 2 updated nothing") and f"{NAME}.nonfinite: skip; 1 so" in told
    lines = [line for line in said if line.startswith("step ") and "| loss" in line]
    assert ["skipped 1" in line for line in lines] == [False, True, True, True]
    changed = {
        step: [n for n, v in states[step].items() if not torch.equal(v, states[step - 1][n])]
        for step in (2, 3)
    }
    assert changed[2] == []
    assert any(name.endswith("expert_bias_E") for name in changed[3])
    assert len(changed[3]) > 50
    steps = [int(v) for name, v in states[4].items() if name.endswith(".step")]
    assert set(steps) == {3}
    assert [line["optimizer/skipped_steps"] for line in metrics(tmp_path)] == [0, 1, 1, 1]
    loads = [line["moe/max_over_mean_load"] for line in metrics(tmp_path)]
    assert all(1 <= load <= 4 for load in loads)


class Failing(Component):
    """Cannot be used once the trainer stands."""

    name = "failing"
    summary = "fails"

    def on_built(self, trainer: RecipeTrainer) -> None:
        raise ZeroDivisionError("on_built")


def test_host_memory_is_released_where_the_trainer_cannot_be_built(
    corpus: Path, tmp_path: Path
) -> None:
    failing = Failing(Component.Config(enabled=True))
    with pytest.raises(ZeroDivisionError, match="on_built"):
        train(tmp_path / "one", [*settings(corpus, 1), *ON], components=[failing])
    assert NAME not in host_accountant().holdings
    train(tmp_path / "two", [*settings(corpus, 1), *ON])
    assert len(losses(tmp_path / "two")) == 1


@pytest.mark.parametrize(
    "place",
    [
        "components.titan.streamed_optimizer.use_compute_dtypes",
        "components.titan.trainer.RecipeTrainer._agree_on_data",
    ],
    ids=["in the optimizer", "before components know the trainer"],
)
def test_host_memory_is_released_however_early_building_fails(
    place: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> int:
        raise ZeroDivisionError("early")

    monkeypatch.setattr(place, fail)
    with pytest.raises(ZeroDivisionError, match="early"):
        train(tmp_path, [*settings(corpus, 1), *ON])
    assert NAME not in host_accountant().holdings
