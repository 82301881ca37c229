"""What the project relies on in torchtitan, and how components reach it."""

import dataclasses
import inspect
import logging
import sys
from pathlib import Path

import pytest
import torch
import torchtitan.trainer
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

from components.core.base import Component
from components.core.registry import component_types, enabled_components
from components.titan import attention, device
from components.titan.build import prepare
from components.titan.plan import RunPlan
from components.titan.stop import StopRequest
from components.titan.story import STORY
from components.titan.trainer import RecipeTrainer, _mix, refuse_different_corpora
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from tests.training import small_overrides


def plan(tmp_path: Path, *overrides: str) -> RunPlan:
    loaded = load_recipe(
        RECIPES / "quickstart.yaml", [*small_overrides(tmp_path / "corpus"), *overrides]
    )
    run = prepare(loaded.recipe, tmp_path, "cpu", 1)
    return RunPlan(loaded.recipe, run.config, "cpu", 1)


@override(target=FlexAttention.Config, fqns=["*.layers.1.*"], description="test")
def second_layer_only(cfg: FlexAttention.Config) -> FlexAttention.Config:
    return derive(cfg, attention.SdpaAttention.Config)


@override(target=VarlenAttention.Config, description="test")
def matches_nothing(cfg: VarlenAttention.Config) -> VarlenAttention.Config:
    return cfg


def test_an_override_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    run = plan(tmp_path)
    with pytest.raises(ValueError, match="components.a replaces no part of model 'moe'"):
        run.override("a", matches_nothing)
    run.override("a", second_layer_only)
    assert f"{__name__}.second_layer_only" in run.config.override.imports


def test_a_seam_has_one_owner(tmp_path: Path) -> None:
    run = plan(tmp_path)
    run.set_loss("first", CrossEntropyLoss.Config())
    run.set_loss("first", CrossEntropyLoss.Config())
    with pytest.raises(ValueError, match="components.second and components.first both replace"):
        run.set_loss("second", CrossEntropyLoss.Config())


def test_hooks_run_in_order(tmp_path: Path) -> None:
    run, calls = plan(tmp_path), []
    run.config.model_spec = dataclasses.replace(run.spec, post_optimizer_build_fn=None)
    run.after_optimizer(lambda *args: calls.append("a"))
    run.after_optimizer(lambda *args: calls.append("b"))
    run.after_optimizer(lambda *args: calls.append("first"), first=True)
    run.spec.post_optimizer_build_fn(None, None, None)
    assert calls == ["first", "a", "b"]


def test_off_is_the_stock_path(tmp_path: Path) -> None:
    off = [f"components.{name}.enabled=false" for name in component_types()]
    config = plan(tmp_path, *off).config
    assert type(config.loss) is CrossEntropyLoss.Config
    assert config.activation_checkpoint is None


def test_every_component_says_what_it_is() -> None:
    for name, cls in component_types().items():
        assert cls.name == name and cls.summary and cls.source
        assert cls.Config().enabled is False
        assert set(cls.requires) | set(cls.excludes) <= component_types().keys()
        assert cls.apply is not Component.apply


def test_enabled_components_are_built_from_their_settings() -> None:
    loaded = load_recipe(RECIPES / "quickstart.yaml", ["components.chunked_loss.num_chunks=16"])
    first, second = enabled_components(loaded.recipe.components)
    assert first.name == "chunked_loss" and first.config.num_chunks == 16
    assert second.name == "precision_trimming"


def test_the_trainer_still_has_what_we_override() -> None:
    stock = torchtitan.trainer.Trainer
    for name in ("train", "train_step", "should_continue_training", "init_distributed"):
        assert callable(getattr(stock, name))
    source = inspect.getsource(stock.train)
    # A stop is decided before a step begins, and a step is saved after it ends.
    assert source.index("should_continue_training") < source.index("self.step += 1")
    assert source.index("self.train_step(") < source.index("self.checkpointer.save(")


def test_modules_that_copy_the_device_are_the_ones_we_know() -> None:
    root = Path(torchtitan.__file__).parent
    copies = {
        "torchtitan." + ".".join(file.relative_to(root).with_suffix("").parts)
        for file in root.rglob("*.py")
        if "experiments" not in file.parts
        and any(
            line.startswith("from torchtitan.tools.utils import") and "device_" in line
            for line in file.read_text().splitlines()
        )
    }
    assert copies == set(device._COPIES_DEVICE_AT_IMPORT)
    assert all(sys.modules[name].device_module.is_available() for name in copies
               if name in sys.modules and hasattr(sys.modules[name], "device_module"))  # fmt: skip


def test_cpu_memory_is_measured() -> None:
    def grown() -> int:
        device.reset_peak_resident_bytes()
        before = device.peak_resident_bytes()
        block = bytearray(64 * 2**20)
        after = device.peak_resident_bytes()
        del block
        return after - before

    # A machine short of memory may take other pages of this process back in the meantime.
    assert max(grown() for _ in range(5)) > 48 * 2**20


def test_a_peak_that_cannot_be_reset_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(self: Path, text: str) -> int:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", forbidden)
    device._tell_of_one_interval.cache_clear()
    with caplog.at_level(logging.INFO, logger=STORY):
        device.reset_peak_resident_bytes()
        device.reset_peak_resident_bytes()
    assert [record.message for record in caplog.records if "clear_refs" in record.message] == [
        "memory: /proc/self/clear_refs cannot be written here, so the peak reported is the peak "
        "since the process started, not of each step"
    ]
    device._tell_of_one_interval.cache_clear()


def test_devices_are_resolved_or_refused() -> None:
    assert device.resolve_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="'tpu' is not one of"):
        device.resolve_device("tpu")  # type: ignore[arg-type]


def test_step_seeds_differ_by_seed_step_and_rank() -> None:
    seeds = {_mix(a, b, c) for a in range(4) for b in range(50) for c in range(4)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert _mix(1, 2, 3) == _mix(1, 2, 3)


def test_a_signal_during_the_vote_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    group = object()
    stop = StopRequest(group)  # type: ignore[arg-type]
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda *args, **kwargs: setattr(stop, "signal", 15)
    )
    assert not stop.agreed()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    assert stop.agreed()


def test_ranks_that_read_different_documents_are_told_apart() -> None:
    refuse_different_corpora(["a", "a", "a"])
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] read a; ranks \[1\] read b"):
        refuse_different_corpora(["a", "b", "a"])


def test_recipe_trainer_config_is_a_trainer_config() -> None:
    assert issubclass(RecipeTrainer.Config, torchtitan.trainer.Trainer.Config)
