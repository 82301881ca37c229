"""What a run reports and draws: figures per step, time left, expert load, step seeds."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torchtitan.components.metrics
import torchtitan.trainer

import components.titan.metrics
from components.titan.build import prepare
from components.titan.expert_load import ExpertLoad
from components.titan.metrics import RunMetrics
from components.titan.story import STORY
from components.titan.trainer import RecipeTrainer, _mix
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from tests.training import small_overrides, train, write_corpus

TOKENS, WAIT = 300, 0.25


class Clock:
    """A clock that moves when it is told to."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (components.titan.metrics, torchtitan.components.metrics):
        monkeypatch.setattr(module, "time", clock)
    peak = SimpleNamespace(max_active_gib=1.0, max_reserved_gib=2.0, num_alloc_retries=0)
    monitor = SimpleNamespace(
        device=torch.device("cuda"),
        device_name="a device",
        device_capacity_gib=8.0,
        get_peak_stats=lambda: peak,
        reset_peak_stats=lambda: None,
    )
    theirs = torchtitan.components.metrics
    monkeypatch.setattr(theirs, "build_device_memory_monitor", lambda: monitor)
    monkeypatch.setattr(theirs.utils, "get_peak_flops", lambda name: 4e12)
    return clock


def reported(
    folder: Path, clock: Clock, seconds: list[float], log_freq: int
) -> list[dict[str, float]]:
    """Lines of metrics.jsonl of a run whose steps take ``seconds``."""
    metrics = RunMetrics(
        RunMetrics.Config(log_freq=log_freq, enable_tensorboard=False, progress_bar=False),
        parallel_dims=SimpleNamespace(non_data_parallel_size=2),
        dump_folder=str(folder),
    )
    metrics.total_steps = len(seconds)
    metrics.num_flops_per_token = 10**10
    for step, duration in enumerate(seconds, start=1):
        clock.now += duration
        metrics.ntokens_since_last_log += TOKENS
        metrics.data_loading_times.append(WAIT)
        if metrics.should_log(step):
            metrics.log(step, 2.0, 2.5, 1.0, {"lr": 1e-3, "n_tokens_seen": step * TOKENS})
    metrics.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_first_every_second_and_the_last_step_are_reported(
    tmp_path: Path, clock: Clock
) -> None:
    lines = reported(tmp_path, clock, [1.5] * 7, log_freq=2)
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 7]


def test_speed_is_per_step_since_the_last_line(tmp_path: Path, clock: Clock) -> None:
    lines = reported(tmp_path, clock, [9.0, 1.0, 1.0, 2.0, 3.0], log_freq=2)
    assert [line["step"] for line in lines] == [1, 2, 4, 5]
    assert [line["speed/step_seconds"] for line in lines] == [9.0, 1.0, 1.5, 3.0]
    assert {line["speed/data_wait_seconds"] for line in lines} == {WAIT}
    # Two ranks share the tokens: half of 300 a step for each device.
    rates = [line["speed/tokens_per_second_per_device"] for line in lines]
    assert rates == pytest.approx([150 / 9, 150.0, 100.0, 50.0])
    flops = [line["speed/tflops_per_device"] for line in lines]
    assert flops == pytest.approx([rate / 100 for rate in rates])
    shares = [line["speed/mfu_percent"] for line in lines]
    assert shares == pytest.approx([rate / 4 for rate in rates])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # The slow first step is no pace.
        ([900.0, 60.0, 60.0, 30.0, 30.0], ["--:--", "3:00", "2:00", "0:50", "0:00"]),
        ([5.0] + [60.0] * 99, ["--:--", "1:38:00", "1:37:00"]),
    ],
)
def test_the_time_left_follows_the_pace_since_the_first_line(
    seconds: list[float],
    expected: list[str],
    tmp_path: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger=STORY):
        reported(tmp_path, clock, seconds, log_freq=1)
    lines = [record.message for record in caplog.records if record.message.startswith("step ")]
    assert len(lines) == len(seconds)
    assert [line.rpartition("| eta ")[2] for line in lines[: len(expected)]] == expected


class Experts(nn.Module):
    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.load_balance_coeff = 0.01
        self.register_buffer("tokens_per_expert_E", torch.tensor(counts, dtype=torch.float32))
        self.register_buffer("expert_bias_E", torch.zeros(len(counts)))


class Layer(nn.Module):
    moe_enabled = True

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.moe = Experts(counts)


class Layers(nn.Module):
    def __init__(self, *counts: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Layer(each) for i, each in enumerate(counts)})


class Optimizers:
    """Keeps the hooks that run before a step, in order."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_step_pre_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def step(self) -> None:
        for hook in self.hooks:
            hook(self, (), {})


def one_rank() -> SimpleNamespace:
    return SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)


def test_the_load_is_the_busiest_expert_of_the_worst_layer() -> None:
    optimizers, load = Optimizers(), ExpertLoad()
    assert load.metrics(load.totals()) == {}
    load.attach(optimizers, [Layers([1, 1, 1, 5], [2, 2, 2, 2])], one_rank())
    optimizers.step()
    assert load.totals() == {"layers.0.moe": [1, 1, 1, 5], "layers.1.moe": [2, 2, 2, 2]}
    expected = {"moe/max_over_mean_load": 2.5, "moe/idle_experts": 0.0}
    assert load.metrics(load.totals()) == expected


def test_experts_without_a_token_are_counted() -> None:
    scalars = ExpertLoad.metrics({"a": [0, 8, 0, 0], "b": [2, 2, 2, 2]})
    assert scalars == {"moe/max_over_mean_load": 4.0, "moe/idle_experts": 3 / 8}


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_every_expert_s_tokens_are_written_when_wanted(tmp_path: Path, recompute: str) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    wanted = ["metrics.expert_load=true", f"components.full_recompute.enabled={recompute}"]
    train(tmp_path / "run", [*small_overrides(corpus), *wanted, "training.steps=2"])
    lines = (tmp_path / "run/expert_load.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    layers = {k: v for k, v in json.loads(lines[1]).items() if k != "step"}
    assert layers and all(name.endswith(".moe") for name in layers)
    # Every one of 2 x 128 tokens visits two experts.
    assert all(sum(counts) == 2 * 128 * 2 for counts in layers.values())


def test_models_without_experts_report_no_load() -> None:
    optimizers, load = Optimizers(), ExpertLoad()
    load.attach(optimizers, [nn.Linear(2, 2)], one_rank())
    optimizers.step()
    assert load.totals() == {}


def test_the_load_is_read_before_balancing_resets_the_counts(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / "quickstart.yaml", small_overrides(tmp_path / "corpus")).recipe
    run = prepare(recipe, tmp_path, "cpu", 1)
    optimizers, model = Optimizers(), Layers([1, 1, 1, 5], [2, 2, 2, 2])
    attach = run.config.model_spec.post_optimizer_build_fn
    attach(optimizers, [model], one_rank())
    optimizers.step()
    totals = run.expert_load.totals()
    assert run.expert_load.metrics(totals)["moe/max_over_mean_load"] == 2.5
    assert model.layers["0"].moe.tokens_per_expert_E.sum() == 0


def seed_of_a_step(monkeypatch: pytest.MonkeyPatch, seed: int | None, step: int, rank: int) -> int:
    """torch's seed while torchtitan's own step runs."""
    seen: list[int] = []
    stock = torchtitan.trainer.Trainer
    monkeypatch.setattr(stock, "train_step", lambda *unused: seen.append(torch.initial_seed()))
    mesh = SimpleNamespace(get_local_rank=lambda: rank)
    trainer: Any = object.__new__(RecipeTrainer)
    trainer.config = SimpleNamespace(debug=SimpleNamespace(seed=seed))
    trainer.parallel_dims = SimpleNamespace(
        dp_enabled=True, get_mesh={"batch": mesh}.__getitem__, get_optional_mesh={"batch": mesh}.get
    )
    trainer.step = step
    trainer.enabled = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        trainer.train_step(iter(()))
    (only,) = seen
    return only


@pytest.mark.parametrize(("seed", "step", "rank"), [(0, 1, 0), (5, 1, 0), (0, 7, 0), (0, 1, 3)])
def test_a_step_draws_by_seed_step_and_rank(
    seed: int, step: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seed_of_a_step(monkeypatch, seed, step, rank) == _mix(seed, step, rank)


def test_without_a_seed_a_step_leaves_the_random_numbers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert seed_of_a_step(monkeypatch, None, 1, 0) == 99
