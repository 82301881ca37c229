"""What a recipe's settings become, and what a continued run accepts."""

import copy
import dataclasses
import datetime
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC

from components.core.problems import RecipeError
from components.core.recipe import Recipe
from components.core.registry import component_types
from components.models.glm_flash.settings import GlmFlashModel
from components.titan.attention import SdpaAttention
from components.titan.build import prepare
from components.titan.optimizer import AdamWSettings
from components.titan.trainer import RecipeTrainer
from kernels.attention.naive import masked_attention
from kernels.attention.sdpa import chunked_sdpa
from launch import record, resume
from launch.config import freeze
from launch.config.checks import check_recipe
from launch.config.groups import RECIPES
from launch.config.load import Loaded, load_recipe
from launch.rundir import RunDir
from tests.training import small_overrides, write_corpus

WIDTH, SCALE = 16, 0.7
# A query times this, at the default scale, scores what the plain query scores at SCALE.
FACTOR = SCALE * math.sqrt(WIDTH)


def loaded(folder: Path, *overrides: str) -> Loaded:
    corpus = write_corpus(folder / "corpus")
    return load_recipe(RECIPES / "quickstart.yaml", [*small_overrides(corpus), *overrides])


def config_of(folder: Path, *overrides: str) -> RecipeTrainer.Config:
    return prepare(loaded(folder, *overrides).recipe, folder, "cpu", 1).config


def causal(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return q >= kv


def heads(length: int) -> list[torch.Tensor]:
    """Queries, keys and values of shape (1, 2, length, WIDTH)."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, 2, length, WIDTH, generator=generator) for _ in range(3)]


def test_chunked_attention_scales_the_scores_as_told() -> None:
    q, k, v = heads(40)
    scaled = chunked_sdpa(q, k, v, causal, scale=SCALE, query_chunk=16)
    torch.testing.assert_close(scaled, chunked_sdpa(q * FACTOR, k, v, causal, query_chunk=16))
    assert (scaled - chunked_sdpa(q, k, v, causal)).abs().max() > 0.1


@pytest.mark.parametrize("out_transform", [None, lambda out, lse: out + lse.unsqueeze(-1)])
def test_the_model_decides_the_scale_with_and_without_sinks(out_transform: Any) -> None:
    q, k, v = (t.transpose(1, 2) for t in heads(40))
    mask = create_block_mask(causal, 1, None, 40, 40, device="cpu")
    attention = SdpaAttention(SdpaAttention.Config())
    others = {"attention_masks": mask, "out_transform": out_transform}
    scaled = attention(q, k, v, scale=SCALE, **others)
    torch.testing.assert_close(scaled, attention(q * FACTOR, k, v, **others))
    assert (scaled - attention(q, k, v, **others)).abs().max() > 0.1


def test_the_dense_twins_default_scale_is_of_the_querys_width() -> None:
    q = torch.tensor([2.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    k = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]).view(1, 1, 2, 4)
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    out, lse = masked_attention(q, k, v, torch.ones(1, 2, dtype=torch.bool))
    # Scores 2 / sqrt(4) and 0.
    assert out.item() == pytest.approx(1 / (1 + math.exp(-1)))
    assert lse.item() == pytest.approx(math.log(math.e + 1))


def test_adamw_settings_reach_the_optimizer() -> None:
    settings = AdamWSettings(
        lr=2e-3,
        betas=(0.8, 0.99),
        eps=1e-6,
        weight_decay=0.3,
        no_decay=["norm", "bias"],
        implementation="foreach",
    )
    container = settings.container()
    plain = {"lr": 2e-3, "betas": (0.8, 0.99), "eps": 1e-6}
    groups = [(g.pattern, g.optimizer_name, g.optimizer_kwargs) for g in container.param_groups]
    assert container.implementation == "foreach"
    # The first pattern that matches decides.
    assert groups == [
        ("norm", "AdamW", {**plain, "weight_decay": 0.0}),
        ("bias", "AdamW", {**plain, "weight_decay": 0.0}),
        (".*", "AdamW", {**plain, "weight_decay": 0.3}),
    ]


def test_training_and_validation_read_their_own_documents(tmp_path: Path) -> None:
    wanted = ("validation.enabled=true", "validation.every=7", "validation.batches=3")
    config = config_of(tmp_path, *wanted)
    assert config.dataloader.split == "train" and config.dataloader.infinite
    validator = config.validator
    assert validator.dataloader.split == "validation"
    assert (validator.enable, validator.freq, validator.steps) == (True, 7, 3)
    assert config.dataloader.corpus == validator.dataloader.corpus
    assert config.dataloader.corpus.paths == [f"{tmp_path}/corpus/*.txt"]
    assert not config_of(tmp_path).validator.enable


def test_full_recompute_sets_the_checkpointing_policy(tmp_path: Path) -> None:
    on = "components.full_recompute.enabled=true"
    for preserve in (True, False):
        key = f"components.full_recompute.preserve_rng_state={str(preserve).lower()}"
        policy = config_of(tmp_path, on, key).activation_checkpoint
        assert type(policy) is FullAC.Config
        assert policy.preserve_rng_state is preserve


def test_chunked_loss_sets_the_loss(tmp_path: Path) -> None:
    loss = config_of(tmp_path, "components.chunked_loss.num_chunks=16").loss
    assert type(loss) is ChunkedLossWrapper.Config
    assert loss.num_chunks == 16
    assert type(loss.loss_fn) is CrossEntropyLoss.Config


@pytest.mark.parametrize(
    ("relation", "wrong", "right", "says"),
    [
        ("requires", "false", "true", "needs components.full_recompute, which is off"),
        ("excludes", "true", "false", "cannot be on with components.full_recompute"),
    ],
)
def test_what_a_component_needs_or_excludes_is_checked(
    relation: str,
    wrong: str,
    right: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(component_types()["chunked_loss"], relation, ("full_recompute",))
    key = "components.full_recompute.enabled"
    check_recipe(loaded(tmp_path, f"{key}={right}").recipe, 1, "cpu")
    with pytest.raises(RecipeError) as refusal:
        check_recipe(loaded(tmp_path, f"{key}={wrong}").recipe, 1, "cpu")
    assert f"components.chunked_loss: {says}" in str(refusal.value)


REFUSED = {
    "model.dim": 96,
    "data.seed": 5,
    "training.seq_len": 256,
    "training.global_batch_size": 8,
    "optimizer.lr": 0.5,
    "lr_scheduler.warmup_steps": 3,
    "debug.seed": 9,
}
ALLOWED = {
    "description": "other words",
    "hardware.ranks": 4,
    "model.attention": "sdpa",
    "model.flex_autotune": True,
    "data.cache_dir": "elsewhere",
    "training.steps": 99,
    "training.local_batch_size": 1,
    "training.gc_freq": 3,
    "training.gc_debug": True,
    "parallelism.expert_parallel_degree": 2,
    "components.full_recompute.enabled": True,
    "checkpoint.interval": 7,
    "validation.every": 3,
    "metrics.log_freq": 5,
    "compile.enable": True,
    "comm.init_timeout_seconds": 17,
    "profiler.enable_profiling": True,
    "debug.detect_anomaly": True,
    "launch.slurm.partition": "large",
    "output_dir": "elsewhere",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recipe as its run's folder keeps it (flat), and as it is now (nested)."""
    folder = tmp_path_factory.mktemp("saved")
    recipe = loaded(folder).recipe
    run = RunDir(folder)
    freeze.write(recipe, run.frozen, [])
    return resume.read_frozen(run), freeze.to_plain(recipe)


def differences(saved: tuple[dict[str, Any], dict[str, Any]], key: str, value: Any) -> list[Any]:
    before, present = saved[0], copy.deepcopy(saved[1])
    *sections, name = key.split(".")
    section = present
    for each in sections:
        section = section[each]
    assert section[name] != value
    section[name] = value
    return resume.compare(before, present)


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_changes_what_is_learnt_must_stay(saved: Any, key: str) -> None:
    value = REFUSED[key]
    assert differences(saved, key, value) == [(key, saved[0][key], value)]


@pytest.mark.parametrize("key", ALLOWED)
def test_a_key_that_does_not_change_what_is_learnt_may_change(saved: Any, key: str) -> None:
    assert differences(saved, key, ALLOWED[key]) == []


IMPLEMENTATIONS = [f.name for f in dataclasses.fields(GlmFlashModel) if f.name.endswith("_kernel")]
IMPLEMENTATIONS.remove("conv_kernel")  # a width


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_run_may_continue_with_other_kernels(name: str) -> None:
    before = {f"model.{name}": "fla", "model.kda_heads": 64}
    assert resume.compare(before, {"model": {name: "reference", "kda_heads": 64}}) == []
    changed = resume.compare(before, {"model": {name: "fla", "kda_heads": 32}})
    assert changed == [("model.kda_heads", 64, 32)]


def test_every_section_has_a_key_above() -> None:
    sections = {key.partition(".")[0] for key in [*REFUSED, *ALLOWED]}
    assert sections == {field.name for field in dataclasses.fields(Recipe)}


def checkpoint(run: RunDir, step: int, when: float | None = None) -> None:
    """Leave what a complete checkpoint of ``step`` leaves, at the time ``when``."""
    metadata = run.path / f"checkpoint/step-{step}/.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.touch()
    if when is not None:
        os.utime(metadata, (when, when))


def test_a_checkpoint_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    checkpoint(run, 10)
    checkpoint(run, 9)
    (tmp_path / "checkpoint/step-11").mkdir()
    (tmp_path / "checkpoint/step-11/__0_0.distcp").touch()
    assert list(run.checkpoints()) == [9, 10]


class Noon(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "Noon":
        return cls(2026, 1, 1, 12, tzinfo=tz)


def two_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[RunDir], Loaded]:
    """Two runs of one recipe, started in the same second."""
    monkeypatch.setattr(record.datetime, "datetime", Noon)
    settings = (f"output_dir='{folder}/out'", "checkpoint.resume=latest")
    now = loaded(folder, *settings)
    return [record.create(now.recipe, now.composed, ["make"]) for _ in range(2)], now


def test_runs_of_the_same_second_have_their_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, _ = two_runs(tmp_path, monkeypatch)
    assert len({run.path for run in runs}) == 2
    assert all(run.frozen.is_file() and not (run.path / "history").exists() for run in runs)


@pytest.mark.parametrize("newer", [0, 1])
def test_latest_is_the_run_with_the_newest_checkpoint(
    newer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, now = two_runs(tmp_path, monkeypatch)
    for index, run in enumerate(runs):
        checkpoint(run, 2, when=2000.0 if index == newer else 1000.0)
    assert resume.find(now.recipe, now.composed).path == runs[newer].path
