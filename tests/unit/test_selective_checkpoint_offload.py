"""The component: training is the same to the bit, and what it refuses it refuses before a step."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from components.core.base import Target
from components.offload import claim as claiming
from components.offload.accountant import GIB, HostBudgetError, host_accountant
from components.offload.layout import units_of
from components.offload.slabs import PAGE, PinningRefused
from components.selective_checkpoint_offload import SelectiveCheckpointOffload
from components.titan.build import prepare
from components.titan.trainer import RecipeTrainer
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from tests.training import full, losses, metrics, small_overrides, train, write_corpus

NAME = "components.selective_checkpoint_offload"
ON = ["components.layer_recompute.enabled=true", f"{NAME}.enabled=true"]
STREAMS = f"{NAME}.streams=true"
GLM = ["model=glm_flash_tiny", "model.index_topk=16"]
MODELS = {"glm": GLM, "moe": ["model=moe_tiny"]}
ACCUMULATION = ["training.local_batch_size=1", "training.global_batch_size=4", "training.steps=2"]
"""Four passes per step."""

ALONE = [
    "components.full_recompute.enabled=false",
    "components.precision_trimming.enabled=false",
    "checkpoint.enable=false",
]
LARGE = "glm_flash_128k_64xh200"
LARGE_ALONE = [
    *ON,
    *ALONE,
    "components.context_parallel.enabled=false",
    "parallelism.context_parallel_degree=1",
    "components.sublayer_chunking.enabled=false",
    "components.sublayer_chunking.kda=true",
    "components.sublayer_chunking.dsa=true",
    f"{NAME}.host_budget_gib=null",
    "components.pipelined_llep.enabled=false",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("offload") / "corpus")


def settings(corpus: Path, model: str) -> list[str]:
    return [*small_overrides(corpus), *MODELS[model], *ACCUMULATION, *ALONE]


def keep_gradients(trainer: RecipeTrainer) -> list[dict[str, torch.Tensor]]:
    """Train to the end; the gradients of every step."""
    kept: list[dict[str, torch.Tensor]] = []

    def keep(*unused: object) -> None:
        named = trainer.model_parts[0].named_parameters()
        kept.append(
            {
                name.replace("_checkpoint_wrapped_module.", ""): full(parameter.grad)
                for name, parameter in named
                if parameter.grad is not None
            }
        )

    trainer.optimizers.register_step_pre_hook(keep)
    trainer.train()
    return kept


@pytest.fixture(scope="module")
def without(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and gradients of every model with nothing recomputed or offloaded."""
    found = {}
    for model in MODELS:
        run = tmp_path_factory.mktemp(model)
        found[model] = train(run, settings(corpus, model), use=keep_gradients), losses(run)
    return found


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    yield
    assert NAME not in host_accountant().holdings


def layers(model: str, corpus: Path) -> int:
    return load_recipe(RECIPES / "quickstart.yaml", settings(corpus, model)).recipe.model.n_layers


def one_boundary(model: str, corpus: Path) -> int:
    overrides = [*settings(corpus, model), *ON]
    return units_of(load_recipe(RECIPES / "quickstart.yaml", overrides).recipe)[0].nbytes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("budget", "extra", "sent"),
    [
        (None, [], None),
        (0, [], 0),
        (1, [STREAMS], 1),
        (None, [STREAMS, "components.layer_recompute.every=2"], None),
    ],
)
def test_losses_and_gradients_are_equal_to_the_bit(
    model: str,
    budget: float | None,
    extra: list[str],
    sent: int | None,
    corpus: Path,
    without: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Budgets are in boundaries; None: no limit."""
    gib = "null" if budget is None else budget * one_boundary(model, corpus) / GIB
    overrides = [*settings(corpus, model), *ON, f"{NAME}.host_budget_gib={gib}", *extra]
    got = train(tmp_path, overrides, use=keep_gradients)
    gradients, expected = without[model]
    assert losses(tmp_path) == expected
    for step, wanted in zip(got, gradients, strict=True):
        assert step.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert torch.equal(step[name], gradient), name
    every = 2 if any("every" in each for each in extra) else 1
    boundaries = -(-layers(model, corpus) // every)
    sent = boundaries if sent is None else sent
    for line in metrics(tmp_path):
        if sent == 0:
            assert not any(name.startswith("offload/") for name in line)
            continue
        assert line["offload/boundaries"] == 4 * sent
        assert line["offload/boundaries_left"] == 4 * (boundaries - sent)
        size = one_boundary(model, corpus)
        assert line["offload/sent_gib"] == 4 * sent * size / GIB
        assert line["offload/payload_gib"] == sent * size / GIB
        assert line["offload/pinned_gib"] <= max(1.02 * sent * size, sent * size + PAGE) / GIB


@pytest.mark.parametrize(
    "extra",
    [
        ["components.layer_recompute.every=3", "components.layer_recompute.keep_sublayers=true"],
        ["components.sublayer_chunking.enabled=true"]
        + ["components.sublayer_chunking.chunk_tokens=64"],
        ["components.sublayer_chunking.enabled=true"]
        + ["components.sublayer_chunking.chunk_tokens=64"]
        + ["components.sublayer_chunking.shared_expert=true"]
        + ["components.layer_recompute.every=2", "components.layer_recompute.keep_sublayers=true"],
    ],
    ids=["sub-layers", "chunks", "both"],
)
def test_kept_outputs_go_too_and_the_plan_is_exact(
    extra: list[str], corpus: Path, tmp_path: Path
) -> None:
    overrides = [*settings(corpus, "glm"), *extra, ON[0]]
    train(tmp_path / "on device", overrides)
    train(tmp_path / "on host", [*overrides, ON[1], STREAMS])
    assert losses(tmp_path / "on host") == losses(tmp_path / "on device")
    for line in metrics(tmp_path / "on host"):
        assert line["offload/sent_gib"] == 4 * line["offload/payload_gib"]
        assert line["offload/boundaries_left"] == 0


def test_the_leak_guard_knows_that_boundaries_go_with_their_micro_batch(
    corpus: Path, tmp_path: Path
) -> None:
    train(tmp_path, [*settings(corpus, "moe"), *ON, STREAMS, "debug.leak_guard=true"])
    assert all(line["offload/boundaries"] for line in metrics(tmp_path))


def test_validation_passes_save_nothing(corpus: Path, tmp_path: Path) -> None:
    validation = ["validation.enabled=true", "validation.every=1", "validation.batches=2"]
    off = [*settings(corpus, "moe"), *validation]
    train(tmp_path / "off", off)
    train(tmp_path / "on", [*off, *ON])
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    lines = [line for line in metrics(tmp_path / "on") if "offload/boundaries" in line]
    assert {line["offload/boundaries"] for line in lines} == {4 * layers("moe", corpus)}


def problems(extra: list[str], corpus: Path, ranks: int = 1) -> list[str]:
    overrides = [*settings(corpus, "glm"), *ON, *extra]
    recipe = load_recipe(RECIPES / "quickstart.yaml", overrides).recipe
    component = recipe.components.selective_checkpoint_offload.build()
    return [str(problem) for problem in component.check(recipe, Target("cuda", ranks))]


def test_a_good_recipe_has_no_problem(corpus: Path) -> None:
    assert problems([], corpus) == []
    assert problems(["hardware.host_memory=64GiB", f"{NAME}.host_budget_gib=8"], corpus, 8) == []


def test_a_budget_above_the_recipes_machine_is_reported_with_the_figures(corpus: Path) -> None:
    found = problems(["hardware.host_memory=64GiB", f"{NAME}.host_budget_gib=9"], corpus, 16)
    assert len(found) == 1
    assert f"{NAME}.host_budget_gib: 8 ranks of a machine with 9.00 GiB each" in found[0]
    assert "hardware.host_memory 64.00 GiB" in found[0] and "use at most 8" in found[0]


@pytest.mark.parametrize("budget", [0, 1e-6])
def test_a_budget_that_holds_nothing_is_reported(budget: float, corpus: Path) -> None:
    (found,) = problems([f"{NAME}.host_budget_gib={budget}"], corpus)
    assert f"{NAME}.host_budget_gib: {budget:g} holds no layer's input" in found
    assert "nothing would be offloaded" in found


def test_two_boundaries_or_fewer_are_not_worth_it(corpus: Path) -> None:
    (found,) = problems(["components.layer_recompute.every=2"], corpus)
    assert f"{NAME}.enabled: true saves nothing: of the 2 layer inputs" in found
    (found,) = problems(["components.layer_recompute.every=4"], corpus)
    assert "of the 1 layer input that" in found
    in_line = f"{NAME}.streams=false"
    assert problems(["components.layer_recompute.every=2", in_line], corpus) == []
    (found,) = problems(["components.layer_recompute.every=4", in_line], corpus)
    assert "keeps, one at a time is on the device anyway" in found


def test_copies_in_line_have_one_input_fewer_on_the_device() -> None:
    def held(*changes: str) -> int:
        settings = [
            "components.layer_recompute.enabled=true", f"{NAME}.enabled=true", *changes,
            "components.precision_trimming.enabled=true",
        ]  # fmt: skip
        recipe = load_recipe(RECIPES / "glm_flash_4layer_8k_1xh200.yaml", settings).recipe
        terms = recipe.components.selective_checkpoint_offload.build()
        return terms.memory_terms(recipe, Target("cuda", 1))[0].nbytes

    # 4 layers: inputs of 8,192 tokens x 4 streams x 4096 bf16.
    assert held() - held(f"{NAME}.streams=false") == 8192 * 4 * 4096 * 2


@pytest.mark.parametrize("budget", [-1, math.inf, math.nan])
def test_a_budget_that_is_no_size_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="host_budget_gib is .*; it must be a number of GiB"):
        SelectiveCheckpointOffload.Config(host_budget_gib=budget)


def test_the_stock_recomputation_is_named_with_the_way_out(corpus: Path) -> None:
    off = "components.layer_recompute.enabled=false"
    (found,) = problems([off, "components.full_recompute.enabled=true"], corpus)
    assert "no effect beside components.full_recompute" in found
    assert "components.layer_recompute.enabled=true" in found


def test_pipeline_parallelism_is_refused(corpus: Path) -> None:
    (found,) = problems(["parallelism.pipeline_parallel_degree=2"], corpus)
    assert "parallelism.pipeline_parallel_degree 2" in found


def large(*extra: str) -> Any:
    return load_recipe(RECIPES / f"{LARGE}.yaml", [*LARGE_ALONE, *extra]).recipe


def terms(*extra: str) -> dict[str, int]:
    recipe = large(*extra)
    component = recipe.components.selective_checkpoint_offload.build()
    found = component.memory_terms(recipe, Target("cuda", 64, 139 * GIB))
    return {term.where: term.nbytes for term in found}


def test_memory_terms_leave_two_boundaries_on_the_device() -> None:
    recipe = large()
    units = units_of(recipe)
    one = units[0].boundary
    parallel = recipe.parallelism.context_parallel_degree
    assert one == 131_072 // parallel * 4 * 4096 * 2
    assert len(units) == 45
    assert terms() == {"device": -43 * one, "host": 45 * one}
    # Beside the computation the last two have not left the device when backward begins.
    assert terms(STREAMS) == {"device": -43 * one, "host": 45 * one}
    some = f"{NAME}.host_budget_gib={10.5 * one / GIB}"
    assert terms(some) == {"device": -10 * one, "host": 10 * one}


def test_kept_outputs_are_part_of_the_plan() -> None:
    """Three dense layers, 34 KDA and 11 sparse ones; an output is a quarter of a boundary."""
    one = units_of(large())[0].boundary
    chunking = "components.sublayer_chunking.enabled=true"
    held = [len(unit.held) for unit in units_of(large(chunking))]
    assert held == [2] * 3 + [1] * 42
    assert {size for unit in units_of(large(chunking)) for size in unit.held} == {one // 4}
    some = [chunking, "components.sublayer_chunking.kda=false"]
    assert sum(len(unit.held) for unit in units_of(large(*some))) == 11 + 3
    shared = [chunking, "components.sublayer_chunking.shared_expert=true"]
    assert sum(len(unit.held) for unit in units_of(large(*shared))) == 45 + 3 + 42
    planned = ["components.pipelined_llep.enabled=true"]
    assert [len(unit.held) for unit in units_of(large(*planned))] == [0] * 3 + [1] * 42
    every = ["components.layer_recompute.every=7", "components.layer_recompute.keep_sublayers=true"]
    # None of a segment's last layer.
    assert [len(unit.held) for unit in units_of(large(*every))] == [12] * 6 + [4]


def test_order_peak_leaves_what_lowers_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer needs most by far: what is below it goes, what it uses itself stays."""
    recipe = large()
    one = units_of(recipe)[0].boundary
    needs: list[int] | None = [GIB] * 44 + [1000 * GIB]
    monkeypatch.setattr(
        type(recipe.model), "layer_working_set_bytes", lambda self, recipe, device: needs
    )
    assert terms(f"{NAME}.order=peak")["host"] == 43 * one
    needs = None
    assert terms(f"{NAME}.order=peak")["host"] == 45 * one


def refused_at_start(corpus: Path, run: Path, *extra: str) -> None:
    def not_reached(trainer: RecipeTrainer) -> None:
        raise AssertionError("the trainer stands")

    train(run, [*settings(corpus, "moe"), *ON, *extra], use=not_reached)


def test_a_machine_with_too_little_memory_is_reported_before_the_first_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "memory_available", lambda: 1000)
    with pytest.raises(HostBudgetError, match=rf"{NAME}\.host_budget_gib: 1 rank would pin"):
        refused_at_start(corpus, tmp_path)


def test_a_budget_above_this_machine_is_reported_before_the_first_step(
    corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(HostBudgetError, match=r"1e\+06 on each of 1 rank is more than the"):
        refused_at_start(corpus, tmp_path, f"{NAME}.host_budget_gib=1000000")


def test_a_refusal_to_pin_is_reported_before_the_first_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PinningRefused("the system refused to pin 0.01 GiB of host memory: error 2")

    monkeypatch.setattr(claiming, "Slab", refuse)
    with pytest.raises(PinningRefused, match=rf"{NAME}\.host_budget_gib: on rank 0 the system"):
        refused_at_start(corpus, tmp_path)


def test_applying_it_needs_no_memory(tmp_path: Path) -> None:
    """The launcher applies components as well, of recipes for far larger machines."""
    before = host_accountant().pinned
    prepare(large(), tmp_path, "cuda", 64)
    assert host_accountant().pinned == before
