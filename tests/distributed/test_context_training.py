"""Whole trainings of GLM-5.3-Flash whose batches are cut over context ranks, against one rank."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from components.context_parallel.component import ContextParallel
from components.context_parallel.layout import Layout
from components.titan.trainer import RecipeTrainer
from tests.distributed.spawn import run_ranks
from tests.distributed.test_glm_parallel import assert_as_one, overrides, single_run, train_and_keep
from tests.training import losses, metrics, train

pytestmark = pytest.mark.distributed

DEGREE = "parallelism.context_parallel_degree"
EXPERTS = "parallelism.expert_parallel_degree=2"
KDA = "components.context_parallel.kda"
CONTIGUOUS = "components.context_parallel.layout=contiguous"
# One row per pass, so that documents go on over every cut; chunks that divide no share.
VALIDATED = ["training.seq_len=256", "training.local_batch_size=1", "training.global_batch_size=4",
             "validation.enabled=true", "validation.every=1", "validation.batches=2",
             "components.chunked_loss.num_chunks=32"]  # fmt: skip
RECOMPUTE = [
    "components.layer_recompute.enabled=true",
    "components.precision_trimming.enabled=true",
    "components.selective_checkpoint_offload.enabled=true",
]
LLEP = [
    "components.pipelined_llep.enabled=true",
    "components.pipelined_llep.chunk_tokens=50",
    "components.pipelined_llep.minimum_rows=1",
]
RING = ["components.chunked_loss.enabled=false", "components.ring_dtp.enabled=true"]
FEED_FORWARD = [
    "components.sublayer_chunking.enabled=true",
    "components.sublayer_chunking.chunk_tokens=64",
    "components.sublayer_chunking.kda=false",
    "components.sublayer_chunking.dsa=false",
]
# Half as many batches of twice the samples.
TWO_AT_A_TIME = "validation.batches=1"
# Ranks, degree and further settings. Ranks beyond the degree read samples of their own.
LAYOUTS: dict[str, tuple[int, int, list[str]]] = {
    "cp2": (2, 2, []),
    "cp2_ep2_all": (2, 2, [EXPERTS, *RECOMPUTE, *LLEP, *RING, *FEED_FORWARD, f"{KDA}=state"]),
    "cp2_ep2_two_rows": (2, 2, [EXPERTS, "training.local_batch_size=2", TWO_AT_A_TIME]),
    "cp2_recompute": (2, 2, [CONTIGUOUS, *RECOMPUTE, f"{KDA}=projections"]),
    "cp2_full_recompute": (2, 2, ["components.full_recompute.enabled=true", f"{KDA}=state",
                                  "debug.leak_guard=true"]),
    "cp4_ep2": (4, 4, [EXPERTS, *RECOMPUTE, *RING]),
    "cp4_state": (4, 4, [f"{KDA}=state"]),
    "cp2_fsdp2": (4, 2, [TWO_AT_A_TIME]),
    "cp2_fsdp2_all": (4, 2, [EXPERTS, *RECOMPUTE, *LLEP, *RING, TWO_AT_A_TIME]),
}  # fmt: skip
QUICK = ("cp2",)


def train_and_keep_layouts(trainer: RecipeTrainer) -> dict[str, Any]:
    """``train_and_keep``, with how every batch of training and validation was cut."""
    layouts: list[Layout] = []
    (component,) = [each for each in trainer.enabled if isinstance(each, ContextParallel)]
    plan = component.plan

    def cut(lengths: tuple[int, ...]) -> Layout:
        layouts.append(type(plan).cut(plan, lengths))
        return layouts[-1]

    object.__setattr__(plan, "cut", cut)
    return {**train_and_keep(trainer), "layouts": layouts}


def train_layout(layout: str, corpus: str, seed: str, out: str) -> None:
    """One rank of a layout's run."""
    _, degree, settings = LAYOUTS[layout]
    on = ["components.context_parallel.enabled=true", f"{DEGREE}={degree}"]
    settings = [*overrides(corpus, seed), *VALIDATED, *on, *settings]
    kept = train(Path(out) / layout, settings, use=train_and_keep_layouts)
    torch.save(kept, Path(out) / f"{layout}.{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, whole; and the seed that all start from."""
    return single_run(tmp_path_factory.mktemp("context"), False, VALIDATED)


def split_run(folder: Path, layout: str) -> list[dict[str, Any]]:
    """Train a layout from the folder's seed; what each rank kept."""
    ranks = LAYOUTS[layout][0]
    seed = str(folder / "seed/checkpoint/step-0")
    arguments = layout, str(folder / "corpus"), seed, str(folder)
    run_ranks(train_layout, ranks, folder / f"{layout}_errors", *arguments)
    return [torch.load(folder / f"{layout}.{n}.pt", weights_only=False) for n in range(ranks)]


@pytest.fixture(scope="module")
def two(single: Path) -> list[dict[str, Any]]:
    """What each of two context ranks kept."""
    return split_run(single, "cp2")


def of_run(run: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(run) if name in line]


def assert_trains_as_one(single: Path, layout: str, kept: list[dict[str, Any]]) -> None:
    assert_as_one(single, layout, kept)
    run, one = single / layout, single / "single"
    found, wanted = (of_run(each, "validation/loss") for each in (run, one))
    assert len(found) == len(wanted) == 3
    assert found == pytest.approx(wanted, rel=1e-3)
    assert of_run(run, "train/tokens_seen") == of_run(one, "train/tokens_seen")
    pairs = zip(of_run(run, "train/loss_max_rank"), losses(run), strict=True)
    assert all(loss <= most < 1.5 * loss for most, loss in pairs)
    for name in ("kda_forward", "kda_backward", "dsa_forward", "dsa_backward"):
        assert min(of_run(run, f"context/{name}_mib")) > 0


def test_two_context_ranks_train_as_one_rank(single: Path, two: list[dict[str, Any]]) -> None:
    assert_trains_as_one(single, "cp2", two)


def test_documents_were_cut_in_every_way_that_can_go_wrong(two: list[dict[str, Any]]) -> None:
    layouts: list[Layout] = two[0]["layouts"]
    assert layouts == two[1]["layouts"]
    # 3 steps of 4 passes, and 2 batches of validation after each.
    assert len(layouts) == 18
    three = [each for each in layouts if len(each.lengths) >= 3]
    assert any(all(part.carries for part in each.parts[:-1]) for each in three)
    assert all(min(each.lengths) < min(map(len, each.parts)) for each in three)
    assert any(each.tokens_of(0) != each.tokens_of(1) for each in layouts)
    assert any(each.tokens_of(0) % 32 for each in layouts)


def test_one_rank_continues_what_two_context_ranks_began(
    single: Path, two: list[dict[str, Any]]
) -> None:
    """From the same place in the data, with the same count of tokens."""
    runs = {}
    for name in ("cp2", "single"):
        runs[name] = single / f"{name}_continued"
        (runs[name] / "checkpoint").mkdir(parents=True)
        (runs[name] / "checkpoint/step-3").symlink_to(single / name / "checkpoint/step-3")
        seed = str(single / "seed/checkpoint/step-0")
        settings = [*overrides(str(single / "corpus"), seed), *VALIDATED[:3], "training.steps=4"]
        train(runs[name], settings)
    assert losses(runs["cp2"]) == pytest.approx(losses(runs["single"]), rel=1e-3)
    seen = [of_run(run, "train/tokens_seen") for run in runs.values()]
    assert seen[0] == seen[1] == [4 * 8 * 128]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in QUICK])
def test_context_ranks_combine(layout: str, single: Path) -> None:
    assert_trains_as_one(single, layout, split_run(single, layout))
    if RECOMPUTE[0] in LAYOUTS[layout][2]:
        # The largest share fits as well into what was pinned.
        assert of_run(single / layout, "offload/boundaries_left") == [0, 0, 0]


def continue_run(corpus: str, seed: str, run: str) -> None:
    """One rank of four that go on with what another number began."""
    on = ["components.context_parallel.enabled=true", f"{DEGREE}=4", "training.steps=4"]
    train(Path(run), [*overrides(corpus, seed), *VALIDATED[:3], *on])


@pytest.mark.slow
def test_four_context_ranks_continue_what_two_began(
    single: Path, two: list[dict[str, Any]]
) -> None:
    run, one = single / "cp4_continued", single / "one_continued"
    for each, begun in ((run, "cp2"), (one, "single")):
        (each / "checkpoint").mkdir(parents=True)
        (each / "checkpoint/step-3").symlink_to(single / begun / "checkpoint/step-3")
    corpus, seed = str(single / "corpus"), str(single / "seed/checkpoint/step-0")
    run_ranks(continue_run, 4, single / "cp4_errors", corpus, seed, str(run))
    train(one, [*overrides(corpus, seed), *VALIDATED[:3], "training.steps=4"])
    assert losses(run) == pytest.approx(losses(one), rel=1e-3)
