"""The component that cuts routed experts: training stays the same, and what it says of memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.core.base import Target
from components.expert_dispatch.experts import ChunkedRoutedExperts
from components.sequence_chunked_moe import SequenceChunkedMoE
from components.titan.trainer import RecipeTrainer
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from tests.training import losses, metrics, small_overrides, train, write_corpus
from tests.unit.chunked_support import counted
from tests.unit.test_sublayer_chunking import Kept, first_gradients

NAME = "components.sequence_chunked_moe"
ON = [f"{NAME}.enabled=true", f"{NAME}.chunk_tokens=60"]
CHUNKS = 5
"""Of 256 tokens."""

RECOMPUTE = ["components.layer_recompute.enabled=true"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("experts") / "corpus")


def settings(corpus: Path, model: str) -> list[str]:
    """256 tokens per pass, two passes per step, two steps."""
    small = [o for o in small_overrides(corpus) if not o.startswith(("model=", "training.steps"))]
    return [f"model={model}", *small, "training.steps=2", "training.global_batch_size=4",
            "training.max_norm=1000000.0", "metrics.expert_load=true"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, tuple[Path, Kept]]:
    """Both families' runs without chunks."""
    found = {}
    for model in ("moe_debug", "glm_flash_tiny"):
        folder = tmp_path_factory.mktemp(model)
        found[model] = folder, train(folder, settings(corpus, model), use=first_gradients)
    return found


def loads(run_dir: Path) -> list[Any]:
    """Tokens of every expert, layer and step."""
    return [json.loads(line) for line in (run_dir / "expert_load.jsonl").read_text().splitlines()]


RUNS: dict[str, tuple[str, list[str]]] = {
    "moe": ("moe_debug", [f"{NAME}.membership=contiguous"]),
    "moe recomputed": ("moe_debug", [*RECOMPUTE, "debug.leak_guard=true"]),
    "glm with all of the others": (
        "glm_flash_tiny",
        [
            *RECOMPUTE,
            "components.layer_recompute.every=2",
            "components.layer_recompute.keep_sublayers=true",
            "components.precision_trimming.enabled=true",
            "components.sublayer_chunking.enabled=true",
            "components.sublayer_chunking.chunk_tokens=64",
        ],
    ),
}
LAYERS = {"moe_debug": 2, "glm_flash_tiny": 3}


@pytest.mark.parametrize("name", RUNS)
def test_training_is_that_without_chunks(
    name: str, tmp_path: Path, corpus: Path, whole: dict[str, tuple[Path, Kept]]
) -> None:
    model, changes = RUNS[name]
    folder, expected = whole[model]
    with counted(ChunkedRoutedExperts, "_routed") as calls:
        found = train(tmp_path, [*settings(corpus, model), *ON, *changes], use=first_gradients)
    # Every chunk runs twice; 2 steps of 2 passes.
    assert len(calls.rows) == CHUNKS * LAYERS[model] * 2 * 2 * 2
    assert sum(calls.with_graph) == len(calls.rows) // 2
    assert losses(tmp_path) == pytest.approx(losses(folder), rel=1e-5)
    assert loads(tmp_path)[0] == loads(folder)[0]
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        error = (found[key] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        # torchtitan's experts multiply in bfloat16.
        assert error < (1e-4 if model == "glm_flash_tiny" else 4e-3), f"{key}: {error:.2e}"


def test_kept_outputs_go_to_the_host_as_planned(
    tmp_path: Path, corpus: Path, whole: dict[str, tuple[Path, Kept]]
) -> None:
    offload = "components.selective_checkpoint_offload.enabled=true"
    train(tmp_path, [*settings(corpus, "glm_flash_tiny"), *ON, *RECOMPUTE, offload])
    folder, _ = whole["glm_flash_tiny"]
    assert losses(tmp_path) == pytest.approx(losses(folder), rel=1e-5)
    sent = [line for line in metrics(tmp_path) if "offload/sent_gib" in line]
    assert sent
    for line in sent:
        # Two passes per step; the accounts agree to the byte.
        assert line["offload/sent_gib"] == 2 * line["offload/payload_gib"]
        assert line["offload/boundaries_left"] == 0


def test_only_routed_experts_are_replaced(tmp_path: Path, corpus: Path) -> None:
    def kinds(trainer: RecipeTrainer) -> dict[str, Any]:
        named = trainer.model_parts[0].named_modules()
        return {n: m.rule for n, m in named if isinstance(m, ChunkedRoutedExperts)}

    changes = [*ON, f"{NAME}.max_chunks=3", f"{NAME}.membership=contiguous"]
    found = train(tmp_path, [*settings(corpus, "glm_flash_tiny"), *changes], use=kinds)
    assert sorted(found) == [f"layers.{n}.moe.routed_experts" for n in (1, 2, 3)]
    for rule in found.values():
        assert (rule.chunk_tokens, rule.max_chunks, rule.membership) == (60, 3, "contiguous")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens is 0; legal: 1 or more"),
        ({"max_chunks": 1}, "max_chunks is 1, which cuts nothing; legal: 2 or more"),
        ({"max_chunks": 0}, "max_chunks is 0; legal: 1 or more"),
        ({"membership": "random"}, "membership is 'random'; legal: strided, contiguous"),
    ],
    ids=str,
)
def test_numbers_that_cut_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceChunkedMoE.Config(**given)


def loaded(recipe: str, *changes: str) -> Any:
    return load_recipe(RECIPES / f"{recipe}.yaml", [f"{NAME}.enabled=true", *changes]).recipe


def component_of(recipe: Any) -> SequenceChunkedMoE:
    return recipe.components.sequence_chunked_moe.build()


def problems(recipe: Any) -> list[str]:
    return [str(p) for p in component_of(recipe).check(recipe, Target("cuda", 1))]


def test_tokens_are_those_that_reach_the_experts() -> None:
    """Tensor-parallel ranks without expert parallelism see each other's tokens; a pipeline's
    micro-batch is smaller than a batch."""
    small = ["training.seq_len=1k", "training.local_batch_size=4", f"{NAME}.chunk_tokens=2k"]
    tensor, experts = "parallelism.tensor_parallel_degree=2", "parallelism.expert_parallel_degree=2"
    assert problems(loaded("quickstart", *small)) == []
    assert problems(loaded("quickstart", *small, tensor)) == []
    (found,) = problems(loaded("quickstart", *small, tensor, experts))
    assert "2048 is all of the 2048 tokens that reach the experts of one rank" in found
    pipeline = ["parallelism.pipeline_parallel_degree=2"]
    pipeline += ["parallelism.pipeline_parallel_microbatch_size=2"]
    (found,) = problems(loaded("quickstart", *small, *pipeline))
    assert "2048 is all of the 2048 tokens" in found


def test_a_dense_model_has_nothing_to_cut() -> None:
    dense = load_recipe(RECIPES / "quickstart.yaml", ["model=llama3_debug"]).recipe
    (found,) = problems(dense)
    assert f"{NAME}.enabled: true finds no routed experts" in found
    assert f"{NAME}.enabled=false" in found


def terms(recipe: Any) -> list[int]:
    return [t.nbytes for t in component_of(recipe).memory_terms(recipe, Target("cuda", 1))]


def test_memory_terms_are_kept_outputs_and_sums_of_gradients() -> None:
    """GLM-5.3-Flash: 45 layers, of which 42 have experts."""
    off = [f"components.{n}.enabled=false" for n in ("layer_recompute", "pipelined_llep")]
    off += ["components.selective_checkpoint_offload.enabled=false"]
    recipe = loaded("glm_flash_128k_64xh200", *off)
    model, ranks = recipe.model, recipe.parallelism.expert_parallel_degree
    sums = 4 * model.n_experts // ranks * 3 * model.dim * model.expert_hidden_dim
    assert terms(recipe) == [sums]
    tokens = recipe.training.local_batch_size * recipe.training.seq_len
    output = tokens * model.dim * 2
    recompute = [*off, *RECOMPUTE]
    assert terms(loaded("glm_flash_128k_64xh200", *recompute)) == [42 * output, sums]
    # Beside shared experts, a sub-layer's output is another tensor.
    kept = ["components.layer_recompute.every=7", "components.layer_recompute.keep_sublayers=true"]
    assert terms(loaded("glm_flash_128k_64xh200", *recompute, *kept))[0] == 42 * output
    # Alone they are the sub-layer, but for the last layer of each of 7 segments, which keeps none.
    alone = [*recompute, *kept, "model.n_shared_experts=0"]
    assert terms(loaded("glm_flash_128k_64xh200", *alone))[0] == 7 * output
