"""GLM-5.3-Flash in a whole training: precision, frozen parts, bias, checkpoints, export, import."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.models.glm_flash.hyper_connections import MixAffine
from components.models.glm_flash.kda import KdaCore
from components.models.glm_flash.short_conv import ShortConv
from components.titan.trainer import RecipeTrainer
from tests.training import checkpoint_state, full, losses, small_overrides, train, write_corpus


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    corpus = write_corpus(tmp_path_factory.mktemp("glm") / "corpus")
    return [*small_overrides(corpus), "model=glm_flash_tiny", "model.index_topk=16"]


def state(trainer: RecipeTrainer) -> dict[str, torch.Tensor]:
    return {name: full(t) for name, t in trainer.model_parts[0].state_dict().items()}


def trained(trainer: RecipeTrainer) -> dict[str, torch.Tensor]:
    trainer.train()
    return state(trainer)


def test_the_loss_falls(tmp_path: Path, overrides: list[str]) -> None:
    train(tmp_path, [*overrides, "training.steps=20", "lr_scheduler.total_steps=20"])
    values = losses(tmp_path)
    assert sum(values[-3:]) < 0.75 * sum(values[:3])


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_some_parameters_stay_in_float32_under_mixed_precision(
    tmp_path: Path, overrides: list[str], recompute: str
) -> None:
    seen: dict[str, set[torch.dtype]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, *unused: Any) -> None:
            for own, parameter in module.named_parameters(recurse=False):
                seen.setdefault(f"{name}.{own}", set()).add(parameter.dtype)

        return hook

    kept: set[str] = set()

    def use(trainer: RecipeTrainer) -> None:
        for name, module in trainer.model_parts[0].named_modules():
            module.register_forward_pre_hook(watch(name))
            if isinstance(module, KdaCore | MixAffine | ShortConv):
                kept.update(f"{name}.{own}" for own, _ in module.named_parameters(recurse=False))
        trainer.train()

    settings = ["training.mixed_precision_param=bfloat16", "training.steps=2"]
    settings.append(f"components.full_recompute.enabled={recompute}")
    train(tmp_path, [*overrides, *settings], use=use)
    assert len(kept) > 8 * 3
    for name, dtypes in seen.items():
        assert dtypes == {torch.float32 if name in kept else torch.bfloat16}, name


def test_a_rate_of_zero_freezes_the_routing_bias(tmp_path: Path, overrides: list[str]) -> None:
    def biases(trainer: RecipeTrainer) -> list[torch.Tensor]:
        return [t for name, t in trained(trainer).items() if name.endswith("expert_bias_E")]

    short = [*overrides, "training.steps=2"]
    moving = train(tmp_path / "moving", short, use=biases)
    frozen = train(tmp_path / "frozen", [*short, "model.load_balance_coeff=0"], use=biases)
    assert len(moving) == len(frozen) == 3
    assert all(bias.abs().max() > 0 for bias in moving)
    assert all((bias == 0).all() for bias in frozen)


def test_a_continued_run_equals_an_uninterrupted_one(tmp_path: Path, overrides: list[str]) -> None:
    options = [*overrides, "checkpoint.interval=2"]
    train(tmp_path / "whole", [*options, "training.steps=4"])
    train(tmp_path / "parts", [*options, "training.steps=2"])
    train(tmp_path / "parts", [*options, "training.steps=4"])
    whole, parts = (
        checkpoint_state(tmp_path / run / "checkpoint/step-4") for run in ("whole", "parts")
    )
    tensors = [name for name, value in whole.items() if isinstance(value, torch.Tensor)]
    assert any("expert_bias_E" in name for name in tensors)
    for name in tensors:
        assert torch.equal(whole[name], parts[name]), name


def test_an_export_starts_the_next_run(tmp_path: Path, overrides: list[str]) -> None:
    export = ["checkpoint.last_save_in_hf=true", "checkpoint.last_save_model_only=true"]
    first = train(tmp_path / "one", [*overrides, *export, "training.steps=2"], use=trained)
    folder = tmp_path / "one/checkpoint/step-2"
    assert (folder / "config.json").is_file()
    load = [
        "checkpoint.initial_load_in_hf=true",
        "checkpoint.initial_load_model_only=true",
        f"checkpoint.initial_load_path='{folder}'",
        "training.steps=1",
    ]
    loaded: dict[str, torch.Tensor] = {}

    def use(trainer: RecipeTrainer) -> None:
        trainer.optimizers.register_step_pre_hook(lambda *unused: loaded.update(state(trainer)))
        trainer.train()

    train(tmp_path / "two", [*overrides, *load], use=use)
    assert loaded.keys() == first.keys()
    for name, tensor in first.items():
        if not name.endswith("expert_bias_E"):
            assert torch.equal(loaded[name], tensor), name
