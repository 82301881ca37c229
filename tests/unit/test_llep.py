"""The components that plan experts' rows, on one rank: what they refuse, build, and say."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.config.override import apply_overrides

from components.core.base import Target
from components.core.registry import enabled_components
from components.expert_dispatch.balanced_experts import BalancedRoutedExperts
from components.expert_dispatch.layer_plan import LayerLoad, PlanRule
from components.expert_dispatch.load_record import HEADLINES, SCALARS, LoadRecord
from components.expert_dispatch.planned import PlannedExperts
from components.titan.build import prepare
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from launch.summary import summarise
from tests.unit.config_support import (
    STEADY,
    Mistake,
    answer_to,
    assert_answers,
    corpus,
    write_recipe,
)

EP = ["hardware.ranks=2", "parallelism.expert_parallel_degree=2"]
LLEP = ["components.llep.enabled=true"]
PIPELINED = ["components.pipelined_llep.enabled=true", "components.pipelined_llep.chunk_tokens=1k"]
KEPT_AND_ROUNDED = ["kept_chunks=2", "rounded_sums=true"]
RECOMPUTE = ["components.layer_recompute.enabled=true"]
TARGET = Target("cuda", 2)
TOKENS, DIM, INNER, EXPERTS, TOP_K, LAYERS = 4096, 64, 64, 8, 2, 4
"""Of one rank of the steady recipe."""

EXPERT = 3 * DIM * INNER
"""Parameters of one expert."""


@pytest.mark.parametrize("mistake", corpus("llep"), ids=lambda mistake: mistake.name)
def test_a_setting_that_cannot_work_is_refused(mistake: Mistake, tmp_path: Path) -> None:
    overrides = mistake.given.removesuffix("\n").split("\n")
    assert_answers(answer_to(write_recipe(tmp_path, STEADY), overrides), mistake.says)


def steady(folder: Path, *changes: str) -> Any:
    return load_recipe(write_recipe(folder, STEADY), [*EP, *changes]).recipe


def component_of(recipe: Any) -> PlannedExperts | None:
    enabled = enabled_components(recipe.components)
    return next((one for one in enabled if isinstance(one, PlannedExperts)), None)


def problems(recipe: Any) -> list[str]:
    component = component_of(recipe)
    assert component is not None
    return [str(problem) for problem in component.check(recipe, TARGET)]


MODELS = {
    "dense": ("llama3_debug", "true finds no routed experts: every layer of the model is dense"),
    "biases": ("gpt_oss_20b", "true cannot run this model: the routed experts are GptOssGrouped"),
}


@pytest.mark.parametrize("enabled", [LLEP, PIPELINED], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_experts_that_can_be_planned_is_refused(
    name: str, enabled: list[str]
) -> None:
    model, says = MODELS[name]
    settings = [f"model={model}", *EP, *enabled, "training.seq_len=4k"]
    found = problems(load_recipe(RECIPES / "quickstart.yaml", settings).recipe)
    assert len(found) == 1 and says in found[0]
    assert enabled[0].replace("true", "false") in found[0]


@pytest.mark.parametrize(
    "given", [["model=glm_flash_tiny", *EP, *LLEP], ["model=moe_debug", *EP, *PIPELINED]], ids=str
)
def test_known_experts_pass(given: list[str]) -> None:
    assert problems(load_recipe(RECIPES / "quickstart.yaml", given).recipe) == []


@pytest.mark.parametrize("enabled", [LLEP, PIPELINED], ids=["whole", "chunks"])
def test_every_layers_experts_get_the_settings(enabled: list[str], tmp_path: Path) -> None:
    name = enabled[0].split(".")[1]
    if name == "pipelined_llep":
        enabled = [*enabled, *(f"components.{name}.{key}" for key in KEPT_AND_ROUNDED)]
    numbers = {"capacity_factor": 1.25, "minimum_rows": 7, "threshold": 1.5}
    recipe = steady(
        tmp_path, *enabled, *(f"components.{name}.{key}={value}" for key, value in numbers.items())
    )
    config = prepare(recipe, tmp_path, "cpu", 2).config
    apply_overrides(config.override, config)
    found = [experts for _, experts, *_ in config.traverse(BalancedRoutedExperts.Config)]
    assert len(found) == LAYERS
    chunks = {"chunk_tokens": None, "max_chunks": 1, "kept_chunks": 0, "rounded_sums": False}
    if name == "pipelined_llep":
        chunks = {"chunk_tokens": 1024, "max_chunks": 10, "membership": "strided"}
        chunks |= {"kept_chunks": 2, "rounded_sums": True}
    for experts in found:
        assert {key: getattr(experts, key) for key in numbers} == numbers
        assert {key: getattr(experts, key) for key in chunks} == chunks


def terms(recipe: Any) -> dict[str, int]:
    component = component_of(recipe)
    assert component is not None
    return {term.name.split(",")[0]: term.nbytes for term in component.memory_terms(recipe, TARGET)}


def test_memory_is_kept_outputs_foreign_weights_sums_and_rows(tmp_path: Path) -> None:
    found = terms(steady(tmp_path, *LLEP))
    own = EXPERT * EXPERTS // 2
    rows = TOP_K * -(-TOKENS * 13 // 10)
    assert found == {
        "weights of experts that a rank helps with": 2 * own,
        "sums of one layer's expert gradients": 2 * (2 * own) + 4 * 2 * (own // 3),
        "rows of experts": rows * (7 * DIM + 3 * INNER) * 2,
    }
    # These experts are the whole sub-layer, whose output is kept once per layer.
    recomputed = terms(steady(tmp_path, *LLEP, *RECOMPUTE))
    kept = "outputs of routed experts"
    assert recomputed == {kept: LAYERS * TOKENS * DIM * 2, **found}


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_seldom_helps_with_more_experts_than_it_has(seed: int) -> None:
    """What the memory terms take for granted; loads of 384 experts on 16 ranks, one of them hot."""
    draw = torch.Generator().manual_seed(seed)
    skew = (0.1, 0.3, 0.7, 1.0, 1.5)[seed]
    weights = torch.exp(skew * torch.randn(384, generator=draw, dtype=torch.float64))
    weights[:24] *= 4
    loads = (weights / weights.sum() * 16 * 8192 * 8).long()
    found = PlanRule().plan(loads, 16)
    helped = Counter(move.helper for move in found.transfers)
    assert found.transfers and max(helped.values()) <= 24


def test_rows_are_those_of_a_chunk_and_of_the_next_on_its_way(tmp_path: Path) -> None:
    chunk = 1024
    for settings, share in (([], 1.3), (["capacity_factor=2"], 2.0), (["threshold=1"], 1.0)):
        given = [f"components.pipelined_llep.{setting}" for setting in settings]
        rows = TOP_K * -(-int(chunk * share * 10) // 10)
        found = terms(steady(tmp_path, *PIPELINED, *given))["rows of experts"]
        assert found == pytest.approx(rows * (9 * DIM + 3 * INNER) * 2, rel=1e-3)


def test_sums_of_several_chunks_are_float32_unless_rounded_and_kept_products_count(
    tmp_path: Path,
) -> None:
    own, name = EXPERT * EXPERTS // 2, "sums of one layer's expert gradients"
    home = 4 * 2 * (own // 3)
    full = terms(steady(tmp_path, *PIPELINED))
    given = (f"components.pipelined_llep.{key}" for key in KEPT_AND_ROUNDED)
    less = terms(steady(tmp_path, *PIPELINED, *given))
    assert full[name] == 4 * 2 * own + home and less[name] == 2 * 2 * own + home
    rows = TOP_K * 2 * -(-1024 * 13 // 10)
    assert less["gate and up of kept chunks"] == LAYERS * rows * 2 * INNER * 2
    assert "gate and up of kept chunks" not in full


def test_a_model_that_knows_its_working_set_counts_the_rows_there() -> None:
    settings = ["training.seq_len=64k", *RECOMPUTE]
    off = ["components.pipelined_llep.enabled=false"]

    def of(*changes: str) -> tuple[dict[str, int], int]:
        file = RECIPES / "glm_flash_128k_64xh200.yaml"
        recipe = load_recipe(file, [*settings, *changes]).recipe
        component = component_of(recipe)
        found = component.memory_terms(recipe, Target("cuda", 64)) if component else []
        working = recipe.model.layer_working_set_bytes(recipe)
        return {term.name: term.nbytes for term in found}, max(working)

    stock, whole, chunks = of(*off), of(*off, *LLEP), of()
    assert not any("rows" in name for found, _ in (whole, chunks) for name in found)
    sums = "sums of one layer's expert gradients, in its backward"
    assert chunks[0].pop(sums) > whole[0].pop(sums)
    assert whole[0] == chunks[0]
    assert chunks[1] < 0.6 * min(stock[1], whole[1])


def test_make_check_shows_it(tmp_path: Path) -> None:
    shown = summarise(steady(tmp_path, *PIPELINED, *RECOMPUTE), TARGET)
    for words in (
        "kept for recomputed layers",
        "helps with",
        "sums of one layer",
        "rows of experts",
    ):
        assert words in shown


def load(before: float, after: float, rows: int, copies: int) -> LayerLoad:
    return LayerLoad(
        before=before, after=after, chunks=3, receive_peak=rows, receive_peak_bytes=10 * rows,
        copies_sent=copies, copied_bytes=2**30 * copies,
    )  # fmt: skip


def test_a_steps_scalars_are_the_worst_and_the_mean_of_layers_and_passes() -> None:
    record = LoadRecord()
    assert record.scalars(None) == {}
    record.add([load(4, 1, 100, 2), None])
    record.add([load(2, 1.5, 300, 0), load(1, 1, 50, 1)])
    found = record.scalars(None)
    assert found.keys() == SCALARS.keys() and HEADLINES.keys() < SCALARS.keys()
    assert (found["llep/rank_load"], found["llep/mean_rank_load"]) == (4, pytest.approx(7 / 3))
    assert found["llep/planned_rank_load"] == 1.5
    assert found["llep/mean_planned_rank_load"] == pytest.approx(3.5 / 3)
    assert (found["llep/chunks"], found["llep/copied_gib"]) == (3, 3)
    assert (found["llep/receive_peak_rows"], found["llep/receive_peak_gib"]) == (300, 3000 / 2**30)
