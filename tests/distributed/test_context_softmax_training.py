"""Whole trainings with softmax attention whose batches are cut over context ranks, against one."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from components.context_parallel.component import ContextParallel
from components.context_parallel.layout import Layout
from components.context_parallel.plan import SplitPlan
from components.context_parallel.softmax.plan import SoftmaxSplit
from components.context_parallel.softmax.volume import softmax_volume
from components.context_parallel.volume import Volume
from components.titan.memory.places import clean_name
from components.titan.trainer import RecipeTrainer
from tests.distributed.spawn import run_ranks
from tests.training import full, losses, metrics, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

DEGREE = "parallelism.context_parallel_degree"
EXPERTS = "parallelism.expert_parallel_degree=2"
SOFTMAX = "components.context_parallel.softmax"
CONTIGUOUS = "components.context_parallel.layout=contiguous"
INNER = "components.context_parallel.inner_ring"
RECOMPUTE = [
    "components.layer_recompute.enabled=true",
    "components.precision_trimming.enabled=true",
    "components.selective_checkpoint_offload.enabled=true",
]
PLANNED = [
    EXPERTS,
    "components.pipelined_llep.enabled=true",
    "components.pipelined_llep.chunk_tokens=50",
    "components.pipelined_llep.minimum_rows=1",
]
RING_DTP = ["components.chunked_loss.enabled=false", "components.ring_dtp.enabled=true"]
TENSOR = "parallelism.tensor_parallel_degree=2"
# One row per pass, so that documents go on over every cut.
SHORT = ["training.seq_len=256", "training.local_batch_size=1", "training.global_batch_size=4",
         "training.steps=3", "validation.enabled=true", "validation.every=1",
         "validation.batches=2",
         # Gradients are compared as they are, and small differences must not be scaled up.
         "training.max_norm=1000000.0"]  # fmt: skip
TWO_AT_A_TIME = "validation.batches=1"
MODELS: dict[str, list[str]] = {
    "moe": ["model.qk_norm=true"],
    "alibi": ["model.position.kind=alibi"],
    # Of its four layers two have windows of 128 tokens: of several parts. Steps take long.
    "gpt_oss": ["model=gpt_oss_20b", "model.flavor=debugmodel",
                "training.mixed_precision_param=bfloat16", "training.steps=1",
                "training.global_batch_size=2", "validation.batches=1"],
}  # fmt: skip
# Model, ranks, degree and further settings. Ranks beyond the degree read samples of their own, or
# share heads.
LAYOUTS: dict[str, tuple[str, int, int, list[str]]] = {
    "cp2_ring_all": ("moe", 2, 2, [f"{SOFTMAX}=ring", *PLANNED, *RECOMPUTE, *RING_DTP]),
    "cp2_auto": ("moe", 2, 2, []),
    "cp2_all_gather": ("moe", 2, 2, [f"{SOFTMAX}=all_gather", EXPERTS, *RECOMPUTE]),
    "cp2_double_ring": ("moe", 2, 2, [f"{SOFTMAX}=double_ring", f"{INNER}=1", CONTIGUOUS]),
    "cp2_two_rows": ("moe", 2, 2, [f"{SOFTMAX}=ring", "training.local_batch_size=2",
                                   TWO_AT_A_TIME]),
    "cp4_ulysses_all": ("moe", 4, 4, [f"{SOFTMAX}=ulysses", *PLANNED, *RECOMPUTE, *RING_DTP]),
    "cp4_all_gather": ("moe", 4, 4, [f"{SOFTMAX}=all_gather", CONTIGUOUS, EXPERTS]),
    "cp4_ring": ("moe", 4, 4, [f"{SOFTMAX}=ring", "components.full_recompute.enabled=true",
                               "debug.leak_guard=true"]),
    "cp4_double_ring": ("moe", 4, 4, [f"{SOFTMAX}=double_ring", f"{INNER}=2", EXPERTS,
                                      *RECOMPUTE]),
    "cp2_fsdp2_all": ("moe", 4, 2, [f"{SOFTMAX}=double_ring", f"{INNER}=2", *PLANNED, *RECOMPUTE,
                                    *RING_DTP, TWO_AT_A_TIME]),
    "cp2_tp2": ("moe", 4, 2, [f"{SOFTMAX}=ulysses", TENSOR]),
    "cp2_alibi": ("alibi", 2, 2, [f"{SOFTMAX}=ring", *RECOMPUTE]),
    "cp4_alibi": ("alibi", 4, 4, [f"{SOFTMAX}=ulysses"]),
    "cp2_tp2_alibi": ("alibi", 4, 2, [f"{SOFTMAX}=ring", TENSOR]),
    "cp2_gpt_oss": ("gpt_oss", 2, 2, [f"{SOFTMAX}=ulysses", EXPERTS, *RECOMPUTE]),
    "cp4_gpt_oss": ("gpt_oss", 4, 4, [f"{SOFTMAX}=ring", EXPERTS, *RING_DTP]),
}  # fmt: skip
QUICK = "cp2_ring_all"


def overrides(model: str, corpus: str, seed: str | None = None) -> list[str]:
    given = MODELS[model]
    small = [o for o in small_overrides(Path(corpus))
             if not (o.startswith("model=") and given[0].startswith("model="))]  # fmt: skip
    if seed is None:
        return [*small, *given, "checkpoint.create_seed_checkpoint=true"]
    load = [f"checkpoint.initial_load_path={seed}", "checkpoint.initial_load_model_only=true"]
    return [*small, *SHORT, *given, *load]


def train_and_keep(trainer: RecipeTrainer) -> dict[str, Any]:
    """Train to the end; the first step's gradients, whole, and how every batch was cut."""
    kept: dict[str, Any] = {"gradients": {}, "layouts": []}
    original = trainer.train_step

    def step(iterator: Iterator) -> None:
        original(iterator)
        if trainer.step == 1:
            for name, parameter in trainer.model_parts[0].named_parameters():
                kept["gradients"][clean_name(name)] = full(parameter.grad)

    for component in trainer.enabled:
        if isinstance(component, ContextParallel):
            kept["plan"] = component.plan
            kept_cut = partial(cut_and_keep, component.plan, kept["layouts"])
            component.plan = replace(component.plan)
            object.__setattr__(component.plan, "cut", kept_cut)
    trainer.train_step = step
    trainer.train()
    return kept


def cut_and_keep(plan: SplitPlan, layouts: list[Layout], lengths: tuple[int, ...]) -> Layout:
    layouts.append(plan.cut(lengths))
    return layouts[-1]


def train_layout(layout: str, corpus: str, seed: str, out: str) -> None:
    """One rank of a layout's run."""
    model, _, degree, settings = LAYOUTS[layout]
    on = ["components.context_parallel.enabled=true", f"{DEGREE}={degree}"]
    settings = [*overrides(model, corpus, seed), *on, *settings]
    kept = train(Path(out) / layout, settings, use=train_and_keep)
    torch.save(kept, Path(out) / f"{layout}.{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a model: a seed checkpoint, and one rank trained from it, whole."""

    @cache
    def single(model: str) -> Path:
        out = tmp_path_factory.mktemp(model)
        corpus = write_corpus(out / "corpus")
        train(out / "seed", overrides(model, str(corpus)), use=RecipeTrainer.save_seed)
        settings = overrides(model, str(corpus), str(out / "seed/checkpoint/step-0"))
        torch.save(train(out / "single", settings, use=train_and_keep), out / "single.pt")
        return out

    return single


def split_run(folder: Path, layout: str) -> list[dict[str, Any]]:
    """Train a layout from the folder's seed; what each rank kept."""
    ranks = LAYOUTS[layout][1]
    arguments = layout, str(folder / "corpus"), str(folder / "seed/checkpoint/step-0"), str(folder)
    run_ranks(train_layout, ranks, folder / f"{layout}_errors", *arguments)
    return [torch.load(folder / f"{layout}.{n}.pt", weights_only=False) for n in range(ranks)]


def of_run(run: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(run) if name in line]


def assert_trains_as_one(folder: Path, layout: str, ranks: list[dict[str, Any]]) -> None:
    """Losses of training and validation, every gradient, and what is counted."""
    run, one, model = folder / layout, folder / "single", LAYOUTS[layout][0]
    # Of gpt-oss everything multiplies in bf16; of the others the experts.
    loose = 3e-2 if model == "gpt_oss" else 1e-2
    assert losses(run)[0] == pytest.approx(losses(one)[0], rel=1e-3 if loose > 1e-2 else 1e-5)
    assert losses(run) == pytest.approx(losses(one), rel=1e-3)
    found, wanted = (of_run(each, "validation/loss") for each in (run, one))
    assert len(found) == len(losses(one)) and found == pytest.approx(wanted, rel=1e-3)
    assert of_run(run, "train/tokens_seen") == of_run(one, "train/tokens_seen")
    expected = torch.load(folder / "single.pt", weights_only=False)["gradients"]
    for rank in ranks:
        assert rank["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            error = (rank["gradients"][name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
            exact = "experts" not in name and model != "gpt_oss"
            assert error < (2e-3 if exact else loose), f"{name}: {error:.2e}"


def assert_documents_cross(layouts: list[Layout]) -> None:
    """They go on over every cut, and are shorter than a share."""
    three = [each for each in layouts if len(each.lengths) >= 3]
    assert any(all(part.carries for part in each.parts[:-1]) for each in three)
    assert any(min(each.lengths) < each.tokens // each.ranks // 2 for each in three)


def assert_counted_bytes(run: Path, kept: dict[str, Any], passes: int, forwards: int) -> None:
    """What the first rank says that a layer sent in a step is what the formulas say."""
    plan, layouts = kept["plan"], kept["layouts"]
    assert isinstance(plan, SoftmaxSplit)
    for mixer in plan.methods:
        # Of a step's batches, which those of its validation follow.
        for step, begin in enumerate(range(0, len(layouts), len(layouts) // len(losses(run)))):
            sent = [of_layer(plan, mixer, layout) for layout in layouts[begin : begin + passes]]
            for way, factor in (("forward", forwards), ("backward", 1)):
                found = of_run(run, f"context/{mixer}_{way}_mib")[step] * 2**20
                assert found == factor * sum(getattr(each, way) for each in sent) > 0


def of_layer(plan: SoftmaxSplit, mixer: str, layout: Layout) -> Volume:
    shape = next(s for s in plan.shapes if (s.window is None) == (mixer == "softmax"))
    return softmax_volume(
        plan.exchange.of_layer(shape.window), layout, 0, shape.heads, plan.element_size,
        shape.window, shape.sinks,
    )  # fmt: skip


def test_two_context_ranks_train_as_one_rank(singles: Callable[[str], Path]) -> None:
    """In a ring, beside planned experts, recomputation, offload and a ring of the vocabulary."""
    folder = singles("moe")
    kept = split_run(folder, QUICK)
    assert_trains_as_one(folder, QUICK, kept)
    assert kept[0]["layouts"] == kept[1]["layouts"]
    assert len(kept[0]["layouts"]) == 3 * (4 + 2)
    assert_documents_cross(kept[0]["layouts"])
    assert_counted_bytes(folder / QUICK, kept[0], passes=4, forwards=2)
    assert of_run(folder / QUICK, "offload/boundaries_left") == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != QUICK])
def test_context_ranks_combine(layout: str, singles: Callable[[str], Path]) -> None:
    model, ranks, degree, settings = LAYOUTS[layout]
    folder = singles(model)
    kept = split_run(folder, layout)
    assert_trains_as_one(folder, layout, kept)
    recomputed = RECOMPUTE[0] in settings or "components.full_recompute.enabled=true" in settings
    reading = 1 if degree == ranks or TENSOR in settings else ranks // degree
    rows = 2 if "training.local_batch_size=2" in settings else 1
    if rows == 1:  # the cut in the middle is where a row ends
        assert_documents_cross(kept[0]["layouts"])
    passes = (2 if model == "gpt_oss" else 4) // (rows * reading)
    assert_counted_bytes(folder / layout, kept[0], passes, forwards=1 + recomputed)
