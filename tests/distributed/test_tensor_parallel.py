"""Whole trainings of GLM-5.3-Flash split over tensor ranks, with all that combines, against one.

Two tensor ranks alone are in ``test_glm_parallel``.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from components.context_parallel.component import ContextParallel
from components.titan.trainer import RecipeTrainer
from tests.distributed.spawn import run_ranks
from tests.distributed.test_context_training import train_and_keep_layouts
from tests.distributed.test_glm_parallel import assert_as_one, overrides, single_run, train_and_keep
from tests.training import losses, metrics, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DEGREE = "parallelism.tensor_parallel_degree"
EXPERTS = "parallelism.expert_parallel_degree=2"
INDEXER = "components.indexer_sharding.enabled=true"
LOAD = "metrics.expert_load=true"
CONTEXT = [
    "components.context_parallel.enabled=true",
    "parallelism.context_parallel_degree=2",
    # One row per pass, so that documents go on over every cut.
    "training.local_batch_size=1",
]
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
CHUNKED_EXPERTS = [
    "components.sequence_chunked_moe.enabled=true",
    "components.sequence_chunked_moe.chunk_tokens=100",
]
CHUNKS = [
    "components.sublayer_chunking.enabled=true",
    "components.sublayer_chunking.chunk_tokens=64",
]
FEED_FORWARD = [
    *CHUNKS,
    "components.sublayer_chunking.kda=false",
    "components.sublayer_chunking.dsa=false",
]
# Ranks and settings. Ranks beyond the degrees read samples of their own.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, [LOAD]),
    "tp2_chunks": (2, [*RECOMPUTE, *CHUNKS, INDEXER]),
    "tp2_chunks_kept": (
        2,
        [*RECOMPUTE, *CHUNKS, "components.layer_recompute.keep_sublayers=true",
         "components.layer_recompute.every=2", "components.sublayer_chunking.streams=true",
         "components.sublayer_chunking.shared_expert=true"],
    ),
    "tp2_experts_in_chunks": (2, [*RECOMPUTE, *CHUNKED_EXPERTS]),
    "tp2_full_recompute": (2, ["components.full_recompute.enabled=true"]),
    "tp2_streamed": (2, ["components.offload_stream_adamw.enabled=true"]),
    "tp2_ep2": (2, [EXPERTS, LOAD]),
    "tp2_ep2_all": (2, [EXPERTS, *RECOMPUTE, *LLEP, *CHUNKS, INDEXER]),
    "tp2_fsdp2": (4, [INDEXER]),
    "cp2_tp2": (4, [*CONTEXT, LOAD]),
    "cp2_tp2_state": (4, [*CONTEXT, "components.context_parallel.kda=state", INDEXER]),
    "cp2_tp2_ep2_all": (4, [*CONTEXT, EXPERTS, *RECOMPUTE, *LLEP, *FEED_FORWARD, INDEXER]),
}  # fmt: skip


def keep(trainer: RecipeTrainer) -> dict[str, Any]:
    """What ``train_and_keep`` keeps, and batches' cuts where there are any."""
    cut = any(isinstance(each, ContextParallel) for each in trainer.enabled)
    return train_and_keep_layouts(trainer) if cut else train_and_keep(trainer)


def train_layout(layout: str, corpus: str, seed: str, out: str) -> None:
    """One rank of a layout's run."""
    settings = [*overrides(corpus, seed), f"{DEGREE}=2", *LAYOUTS[layout][1]]
    kept = train(Path(out) / layout, settings, use=keep)
    torch.save(kept, Path(out) / f"{layout}.{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, whole; and the seed that all start from."""
    return single_run(tmp_path_factory.mktemp("tensor"), False, [LOAD])


def split_run(folder: Path, layout: str) -> list[dict[str, Any]]:
    """Train a layout from the folder's seed; what each rank kept."""
    ranks = LAYOUTS[layout][0]
    seed = str(folder / "seed/checkpoint/step-0")
    arguments = layout, str(folder / "corpus"), seed, str(folder)
    run_ranks(train_layout, ranks, folder / f"{layout}_errors", *arguments)
    return [torch.load(folder / f"{layout}.{n}.pt", weights_only=False) for n in range(ranks)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_ranks_train_as_one_rank(layout: str, single: Path) -> None:
    kept, settings = split_run(single, layout), LAYOUTS[layout][1]
    assert_as_one(single, layout, kept)
    found, wanted = (metrics(single / name)[0] for name in (layout, "single"))
    assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-5)
    if CONTEXT[0] in settings:
        # Shares of odd lengths, which two tensor ranks hold with padding.
        assert any(each.tokens_of(0) % 2 for each in kept[0]["layouts"])
    if RECOMPUTE[0] in settings:
        left = [line.get("offload/boundaries_left") for line in metrics(single / layout)]
        assert left == [0, 0, 0]
    if LOAD in settings:
        runs = single / layout, single / "single"
        loads = [(run / "expert_load.jsonl").read_text().splitlines() for run in runs]
        assert json.loads(loads[0][0]) == json.loads(loads[1][0])
    if INDEXER in settings:
        assert all(line["indexer/received"] > 0 for line in metrics(single / layout))


def test_shared_scoring_changes_nothing(single: Path) -> None:
    """The same pools are chosen, so that every gradient is the same to the bit."""
    for name in ("tp2_plain", "tp2_shared"):
        arguments = name, str(single / "corpus"), str(single / "seed/checkpoint/step-0")
        run_ranks(train_shared, 2, single / f"{name}_errors", *arguments, str(single))
    plain, shared = (torch.load(single / f"{n}.0.pt") for n in ("tp2_plain", "tp2_shared"))
    assert plain["gradients"].keys() == shared["gradients"].keys()
    for name, gradient in plain["gradients"].items():
        assert torch.equal(shared["gradients"][name], gradient), name


def train_shared(name: str, corpus: str, seed: str, out: str) -> None:
    """One rank of a run with or without shared scoring."""
    settings = [*overrides(corpus, seed), f"{DEGREE}=2", "training.steps=1"]
    settings += [INDEXER] if name == "tp2_shared" else []
    kept = train(Path(out) / name, settings, use=train_and_keep)
    torch.save(kept, Path(out) / f"{name}.{os.environ['RANK']}.pt")


def test_one_rank_continues_what_two_tensor_ranks_began(single: Path) -> None:
    split_run(single, "tp2_ep2")
    runs = {}
    for begun in ("tp2_ep2", "single"):
        runs[begun] = single / f"{begun}_continued"
        (runs[begun] / "checkpoint").mkdir(parents=True)
        (runs[begun] / "checkpoint/step-3").symlink_to(single / begun / "checkpoint/step-3")
        seed = str(single / "seed/checkpoint/step-0")
        train(runs[begun], [*overrides(str(single / "corpus"), seed), "training.steps=4"])
    found, wanted = (losses(run) for run in runs.values())
    assert len(found) == 1
    assert found == pytest.approx(wanted, rel=1e-3)


def export(corpus: str, seed: str, run: str) -> None:
    """One rank of a run that ends with the published layout."""
    ends = ["checkpoint.last_save_in_hf=true", "checkpoint.last_save_model_only=true"]
    settings = [*overrides(corpus, seed), f"{DEGREE}=2", *ends, "training.steps=1"]
    train(Path(run), settings, use=without_a_step)


def without_a_step(trainer: RecipeTrainer) -> None:
    """Save what was loaded."""
    trainer.checkpointer.load(step=trainer.config.checkpoint.load_step)
    trainer.checkpointer.save(1, last_step=True)


def test_tensor_ranks_export_whole_tensors(single: Path) -> None:
    corpus, seed = str(single / "corpus"), str(single / "seed/checkpoint/step-0")
    run_ranks(export, 2, single / "export_errors", corpus, seed, str(single / "export"))
    published = str(single / "export/checkpoint/step-1")
    settings = [*overrides(corpus, published), "training.steps=1"]
    train(single / "imported", [*settings, "checkpoint.initial_load_in_hf=true"])
    assert losses(single / "imported") == losses(single / "single")[:1]
