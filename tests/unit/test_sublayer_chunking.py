"""The component that cuts parts of a layer: what it replaces, and that training stays the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from components.core.base import Target
from components.models.glm_flash.chunked.feed_forward import ChunkedFeedForward
from components.models.glm_flash.chunked.kda import ChunkedKDA
from components.models.glm_flash.chunked.mla import ChunkedSparseMLA
from components.models.glm_flash.indexer_loss import IndexerLoss
from components.models.glm_flash.kda import KdaCore
from components.sublayer_chunking import SublayerChunking
from components.titan.trainer import RecipeTrainer
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from tests.training import full, losses, small_overrides, train, write_corpus
from tests.unit.chunked_support import config_of, counted

CHUNKING = "components.sublayer_chunking"
ON = [f"{CHUNKING}.enabled=true", f"{CHUNKING}.chunk_tokens=64"]
RECOMPUTE = ["components.layer_recompute.enabled=true"]
TRIMMED = "components.precision_trimming.enabled=true"
KINDS = ChunkedKDA | ChunkedSparseMLA | ChunkedFeedForward

Kept = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """256 tokens per pass, two passes per step, of ragged documents; pools are chosen."""
    corpus = write_corpus(tmp_path_factory.mktemp("chunking") / "corpus")
    small = [o for o in small_overrides(corpus) if not o.startswith(("model=", "training.steps"))]
    return ["model=glm_flash_tiny", "model.index_topk=16", "training.steps=2", *small,
            "training.global_batch_size=4", "training.max_norm=1000000.0"]  # fmt: skip


def first_gradients(trainer: RecipeTrainer) -> Kept:
    """Train; the first step's gradients by name."""
    kept: Kept = {}
    original = trainer.train_step

    def step(iterator: Iterator) -> None:
        original(iterator)
        if trainer.step == 1:
            for name, parameter in trainer.model_parts[0].named_parameters():
                if parameter.grad is not None:
                    plain = name.replace("_checkpoint_wrapped_module.", "")
                    kept[plain] = full(parameter.grad)

    trainer.train_step = step
    trainer.train()
    return kept


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, overrides: list[str]) -> tuple[Path, Kept]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, overrides, use=first_gradients)


SETTINGS: dict[str, list[str]] = {
    "alone": [],
    "shared expert": [f"{CHUNKING}.shared_expert=true"],
    "recompute": RECOMPUTE,
    "recompute every 3": [*RECOMPUTE, "components.layer_recompute.every=3"],
    "recompute, kept": [
        *RECOMPUTE,
        "components.layer_recompute.every=2",
        "components.layer_recompute.keep_sublayers=true",
    ],
    "recompute, trimmed": [*RECOMPUTE, TRIMMED],
    "recompute, streams": [
        *RECOMPUTE,
        TRIMMED,
        "components.layer_recompute.every=2",
        f"{CHUNKING}.streams=true",
        f"{CHUNKING}.shared_expert=true",
    ],
    "dense only": [f"{CHUNKING}.kda=false", f"{CHUNKING}.dsa=false"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_training_is_that_without_chunks(
    name: str, tmp_path: Path, overrides: list[str], whole: tuple[Path, Kept]
) -> None:
    folder, expected = whole
    with counted(KdaCore, "piece_kernel") as calls:
        found = train(tmp_path, [*overrides, *ON, *SETTINGS[name]], use=first_gradients)
    # 4 chunks in each of 3 layers, twice; 2 steps of 2 passes.
    assert len(calls.rows) == (0 if name == "dense only" else 4 * 3 * 2 * 2 * 2)
    assert losses(tmp_path) == pytest.approx(losses(folder), rel=1e-5)
    assert found.keys() == expected.keys()
    assert not any(".indexer." in name for name in found)
    for key, gradient in expected.items():
        error = (found[key] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-4, f"{key}: {error:.2e}"


def kinds(trainer: RecipeTrainer) -> dict[str, type]:
    named = trainer.model_parts[0].named_modules()
    return {name: type(module) for name, module in named if isinstance(module, KINDS)}


@pytest.mark.parametrize(
    ("switches", "replaced"),
    [
        ([], ["layers.0.attention", "layers.0.feed_forward", "layers.1.attention",
              "layers.2.attention", "layers.3.attention"]),
        (["kda=false"], ["layers.0.feed_forward", "layers.3.attention"]),
        (["kda=false", "dsa=false"], ["layers.0.feed_forward"]),
        (["kda=false", "dsa=false", "feed_forward=false", "shared_expert=true"],
         [f"layers.{n}.moe.shared_experts" for n in (1, 2, 3)]),
    ],
)  # fmt: skip
def test_each_switch_replaces_its_parts_and_no_others(
    switches: list[str], replaced: list[str], tmp_path: Path, overrides: list[str]
) -> None:
    changes = [f"{CHUNKING}.{switch}" for switch in switches]
    found = train(tmp_path, [*overrides, *ON, *changes], use=kinds)
    assert sorted(found) == replaced


def test_indexers_train_beside_the_other_parts(tmp_path: Path, overrides: list[str]) -> None:
    settings = [*overrides, "components.indexer_training.enabled=true"]
    expected = train(tmp_path / "whole", settings, use=first_gradients)
    changes = [*ON, f"{CHUNKING}.dsa=false"]
    found = train(tmp_path / "chunked", [*settings, *changes], use=first_gradients)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        error = (found[key] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-4, f"{key}: {error:.2e}"


def test_a_part_with_a_loss_for_its_indexer_is_not_built() -> None:
    config = config_of("dsa", 64)
    config.indexer_loss = IndexerLoss.Config(
        coefficient=1.0, tokens=1, support="selected", kpool=4, scale=1.0, index_scale=1.0
    )
    with pytest.raises(ValueError, match="sublayer_chunking.dsa: true cannot train indexers"):
        config.build()


@pytest.mark.parametrize("given", [0, 32, 63, 96, 1000])
def test_a_chunk_that_is_no_multiple_of_64_is_refused(given: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_tokens is {given}; it must be a multiple of 64"):
        SublayerChunking.Config(chunk_tokens=given)


def problems(changes: list[str]) -> list[str]:
    settings = [*ON, *changes]
    loaded = load_recipe(RECIPES / "glm_flash_4layer_8k_1xh200.yaml", settings).recipe
    component = loaded.components.sublayer_chunking.build()
    return [str(problem) for problem in component.check(loaded, Target("cuda", 1))]


def test_a_model_without_dense_layers_is_cut_at_its_mixers() -> None:
    changes = ["model.n_dense_layers=0", f"{CHUNKING}.chunk_tokens=4096"]
    assert problems(changes) == []
    off = [f"{CHUNKING}.kda=false", f"{CHUNKING}.dsa=false"]
    (only,) = problems([*changes, *off])
    assert "true with no part to cut saves nothing" in only
    assert f"{CHUNKING}.kda" in only and f"{CHUNKING}.feed_forward" not in only


def test_streams_are_merged_again_by_trimmed_functions_or_kernels() -> None:
    streams = [f"{CHUNKING}.streams=true", f"{CHUNKING}.chunk_tokens=4096"]
    kernels = "model.hyper_connections_kernel=triton"
    assert problems([*streams, kernels, TRIMMED.replace("true", "false")]) == []
    streams.append("model.hyper_connections_kernel=torch")
    off = "components.precision_trimming.hyper_connections=false"
    for changes in ([*streams, TRIMMED.replace("true", "false")], [*streams, TRIMMED, off]):
        (only,) = problems(changes)
        assert f"{CHUNKING}.streams" in only and "hyper_connections, which is off" in only
    parts = [f"{CHUNKING}.{part}=false" for part in ("kda", "dsa", "feed_forward")]
    assert problems([*streams, *parts, TRIMMED]) == []


def test_the_size_of_chunks_matters_only_where_a_part_is_cut() -> None:
    streams = [f"{CHUNKING}.streams=true", f"{CHUNKING}.chunk_tokens=16k", TRIMMED]
    parts = [f"{CHUNKING}.{part}=false" for part in ("kda", "dsa", "feed_forward")]
    (only,) = problems(streams)
    assert f"{CHUNKING}.chunk_tokens: 16384 is all of the" in only
    assert problems([*streams, *parts]) == []


def terms(changes: list[str]) -> dict[str, int]:
    settings: list[Any] = [
        *ON, "training.seq_len=128k", "training.local_batch_size=1",
        f"{CHUNKING}.chunk_tokens=16k", *changes,
    ]  # fmt: skip
    loaded = load_recipe(RECIPES / "glm_flash_4layer_8k_1xh200.yaml", settings).recipe
    component = loaded.components.sublayer_chunking.build()
    return {t.name: t.nbytes for t in component.memory_terms(loaded, Target("cuda", 1))}


def test_memory_terms_are_the_outputs_and_states_that_recomputed_layers_take() -> None:
    """4 layers: 3 KDA, 1 DSA, some of them dense; 8 KB per token and output, 4 MiB per state."""
    off = ["components.full_recompute.enabled=false", "components.layer_recompute.enabled=false"]
    assert terms(off) == {}
    on = ["components.full_recompute.enabled=false", *RECOMPUTE]
    states = 3 * 7 * 4 * 2**20
    found = terms([*on, f"{CHUNKING}.feed_forward=false"])
    assert sorted(found.values()) == sorted([4 * 2**17 * 8192, states])
    kept = ["components.layer_recompute.every=2", "components.layer_recompute.keep_sublayers=true"]
    # Sub-layers' outputs are kept anyway, but for the last layers of segments: 1 and 3.
    assert sorted(terms([*on, *kept]).values()) == sorted([2 * 2**17 * 8192, states])


def test_memory_terms_of_one_of_two_tensor_ranks() -> None:
    """Outputs wait to be summed over ranks, so that sub-layers' outputs are others, and every rank
    has those of all tokens; states are those of its heads."""
    on = ["components.full_recompute.enabled=false", *RECOMPUTE]
    two = ["parallelism.tensor_parallel_degree=2", "hardware.ranks=2"]
    kept = ["components.layer_recompute.every=2", "components.layer_recompute.keep_sublayers=true"]
    states, output = 3 * 7 * 4 * 2**20 // 2, 2**17 * 8192
    mixers = [*on, *two, f"{CHUNKING}.feed_forward=false"]
    for changes in (mixers, [*mixers, *kept]):
        assert sorted(terms(changes).values()) == sorted([4 * output, states])
