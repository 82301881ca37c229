"""The component: what it refuses, before anything is allocated, and what it says of memory."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.core.base import Target
from components.offload.accountant import GIB, HostBudgetError, host_accountant
from components.offload.slabs import PAGE
from components.offload_stream_adamw import OffloadStreamAdamW
from components.titan import streamed_optimizer
from components.titan.build import prepare
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from launch.summary import memory_terms, summarise
from tests.training import small_overrides, train, write_corpus

NAME = "components.offload_stream_adamw"
LARGE = "moe_120b_128k_16xh200"
PARAMETERS = 120 * 10**9
"""Of the large model, roughly."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("streamed") / "corpus")


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    yield
    assert NAME not in host_accountant().holdings


def load(name: str, *overrides: str) -> Any:
    return load_recipe(RECIPES / f"{name}.yaml", [f"{NAME}.enabled=true", *overrides]).recipe


def problems(*overrides: str, ranks: int = 16, name: str = LARGE) -> list[str]:
    recipe = load(name, *overrides)
    component = recipe.components.offload_stream_adamw.build()
    return [str(problem) for problem in component.check(recipe, Target("cuda", ranks))]


def terms(*overrides: str, ranks: int = 16, name: str = LARGE) -> dict[str, int]:
    recipe = load(name, *overrides)
    found = memory_terms(recipe, Target("cuda", ranks))
    return {term.name: term.nbytes for term in found}


def test_a_good_recipe_has_no_problem() -> None:
    assert problems("hardware.host_memory=2TiB") == []
    assert problems(f"{NAME}.host_budget_gib=128") == []


def test_fsdps_own_offload_is_refused() -> None:
    (found,) = problems("training.enable_cpu_offload=true")
    assert f"training.enable_cpu_offload: true cannot be combined with {NAME}" in found


def test_machines_with_too_little_memory_are_reported_with_the_figures() -> None:
    (found,) = problems("hardware.host_memory=600GiB")
    assert f"{NAME}.enabled: true needs" in found
    assert "8 ranks x" in found and "hardware.host_memory is 600.00 GiB" in found
    assert "use more ranks, fewer per machine" in found
    assert problems("hardware.host_memory=600GiB", ranks=32) == []


def test_a_budget_that_is_too_small_is_reported_with_what_is_needed() -> None:
    (found,) = problems(f"{NAME}.host_budget_gib=40")
    assert f"{NAME}.host_budget_gib: 40 GiB do not hold the optimizer state of one rank" in found
    needed = float(found.split("which takes ")[1].split()[0])
    assert needed == pytest.approx(12 * PARAMETERS / 16 / GIB, rel=0.06)
    enough = float(found.split("use ")[1].split()[0])
    assert needed <= enough < needed + 0.02
    assert problems(f"{NAME}.host_budget_gib={enough}") == []


@pytest.mark.parametrize("budget", [0, -1, math.inf, math.nan])
def test_a_budget_that_is_no_size_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="host_budget_gib is .*; it must be a number of GiB"):
        OffloadStreamAdamW.Config(host_budget_gib=budget)


@pytest.mark.parametrize("split", [-0.1, 1.1, math.nan])
def test_a_share_that_is_none_is_refused(split: float) -> None:
    with pytest.raises(ValueError, match="split is .*; it must be auto, or a number from 0"):
        OffloadStreamAdamW.Config(split=split)


def test_six_bytes_of_sixteen_stay_on_the_device() -> None:
    """bf16 weights and fp32 gradients; beside them a step's staging, for a while."""
    stock = terms(f"{NAME}.enabled=false")["parameters, gradients and AdamW moments"]
    streamed = terms(f"{NAME}.split=0")
    parameters = stock // 16
    assert streamed["parameters, gradients and AdamW moments"] == stock
    assert streamed["fp32 weights and moments, kept on the host"] == -12 * parameters
    assert streamed["weights in the dtype that layers compute in"] == 2 * parameters
    # The recipe's 7.5 billion per rank, cut into equal buckets of at most 100 million.
    staging = streamed["staging of the optimizer step"]
    assert 0.97 * 2 * 100e6 * 12 <= staging <= 2 * 100e6 * 12
    pinned = streamed["pinned for fp32 weights and moments"]
    assert 12 * parameters <= pinned <= 12 * parameters + 2 * PAGE


def test_computing_in_float32_keeps_float32_weights() -> None:
    half, whole = (
        terms(f"training.mixed_precision_param={dtype}")[
            "weights in the dtype that layers compute in"
        ]
        for dtype in ("bfloat16", "float32")
    )
    assert whole == 2 * half


def test_frozen_weights_stay_where_they_are() -> None:
    """Only what is trained has a master, a gradient and moments."""
    indexer = "components.indexer_training"
    trained = {
        "backbone": [f"{indexer}.enabled=false"],
        "everything": [f"{indexer}.enabled=true", f"{indexer}.only=false"],
        "indexers": [f"{indexer}.enabled=true", f"{indexer}.only=true"],
    }
    pinned = {
        what: terms(f"{NAME}.split=0", *extra, ranks=64, name="glm_flash_128k_64xh200")[
            "pinned for fp32 weights and moments"
        ]
        for what, extra in trained.items()
    }
    assert 0 < pinned["indexers"] < pinned["backbone"]
    assert abs(pinned["indexers"] + pinned["backbone"] - pinned["everything"]) <= 3 * PAGE


def test_replicas_hold_the_same_parameters_again() -> None:
    pinned = "pinned for fp32 weights and moments"
    alone, halves, replicas = (
        terms(f"parallelism.data_parallel_replicate_degree={degree}", ranks=ranks)[pinned]
        for degree, ranks in ((1, 16), (1, 32), (2, 32))
    )
    assert replicas == alone > halves


def test_the_summary_compares_what_is_left_with_the_device() -> None:
    alone = ["components.layer_recompute.enabled=true", "hardware.memory=100GiB"]
    off = summarise(load(LARGE, *alone, f"{NAME}.enabled=false"), Target("cuda", 16, 100 * GIB))
    assert "DO NOT FIT" in off
    on = summarise(load(LARGE, *alone), Target("cuda", 16, 100 * GIB))
    assert "GiB per rank on the host: pinned for fp32 weights and moments" in on


def test_applying_it_needs_no_memory(tmp_path: Path) -> None:
    """The launcher applies components as well, of recipes for far larger machines."""
    before = host_accountant().pinned
    run = prepare(load(LARGE), tmp_path, "cuda", 16)
    assert isinstance(run.config.optimizer, streamed_optimizer.StreamedOptimizers.Config)
    assert host_accountant().pinned == before


def on_one_rank(corpus: Path, run: Path, *overrides: str) -> None:
    train(run, [*small_overrides(corpus), f"{NAME}.enabled=true", f"{NAME}.split=0", *overrides])


def test_a_budget_that_is_too_small_is_refused_before_the_first_step(
    corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(HostBudgetError, match=rf"{NAME}\.host_budget_gib: 0\.00 GiB do not hold"):
        on_one_rank(corpus, tmp_path, f"{NAME}.host_budget_gib=0.0001")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_another_ranks_need_is_refused_here_as_well(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_optimizer, "gather", lambda value: [value, 3 * GIB])
    with pytest.raises(HostBudgetError, match=r"2\.00 GiB do not hold .* takes 3\.00 GiB; use 3 "):
        on_one_rank(corpus, tmp_path, f"{NAME}.host_budget_gib=2")


def test_a_machine_without_the_memory_is_refused_before_the_first_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.offload.claim.memory_available", lambda: 2**20)
    with pytest.raises(HostBudgetError, match=rf"{NAME}.*1 rank would pin 0\.00 GiB each, but"):
        on_one_rank(corpus, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_on_a_cpu_nothing_is_measured_and_no_second_pool_of_threads_made() -> None:
    component = OffloadStreamAdamW(OffloadStreamAdamW.Config(enabled=True))
    assert component.split_on("cpu") == 0.0 and component.split_on("cuda") == "auto"
    given = OffloadStreamAdamW(OffloadStreamAdamW.Config(enabled=True, split=0.5))
    assert given.split_on("cpu") == given.split_on("cuda") == 0.5
