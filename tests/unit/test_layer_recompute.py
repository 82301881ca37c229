"""The component: what it refuses, what it says of memory, and whole runs with it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from components.core.base import MemoryTerm, Target
from components.core.registry import enabled_components
from components.layer_recompute import LayerRecompute
from components.titan.trainer import RecipeTrainer
from launch.config.load import load_recipe
from tests.training import checkpoint_state, metrics, small_overrides, train, write_corpus
from tests.unit.config_support import (
    STEADY,
    STEADY_GLM,
    Mistake,
    answer_to,
    assert_answers,
    corpus,
    write_recipe,
)

ON = "components.layer_recompute.enabled=true"
EVERY = "components.layer_recompute.every"
KEEP = "components.layer_recompute.keep_sublayers=true"


@pytest.mark.parametrize("mistake", corpus("layer_recompute"), ids=lambda mistake: mistake.name)
def test_a_setting_that_cannot_work_is_refused(mistake: Mistake, tmp_path: Path) -> None:
    overrides = mistake.given.removesuffix("\n").split("\n")
    assert_answers(answer_to(write_recipe(tmp_path, STEADY), overrides), mistake.says)


def terms(folder: Path, recipe_text: str, *overrides: str) -> dict[str, int]:
    """Memory terms of the component in a recipe."""
    recipe = load_recipe(write_recipe(folder, recipe_text), [ON, *overrides]).recipe
    (component,) = (
        c for c in enabled_components(recipe.components) if c.name == LayerRecompute.name
    )
    found: list[MemoryTerm] = component.memory_terms(recipe, Target("cpu", 1))
    return {term.name: term.nbytes for term in found}


KEPT = "hidden states between layers, kept for backward"
REBUILT = "hidden states of one group of layers, rebuilt"
CHOSEN = "chosen experts and pools, kept for backward"
OUTPUTS = "outputs of mixers and feed-forward parts, kept"


def test_memory_terms_of_every_layer(tmp_path: Path) -> None:
    # Two sequences of 2048 tokens, width 64 in bfloat16; four routers choose 2 experts each.
    tokens = 2 * 2048
    assert terms(tmp_path, STEADY) == {KEPT: tokens * 4 * 64 * 2, CHOSEN: tokens * 4 * 2 * 8}


def test_memory_terms_of_groups_of_layers(tmp_path: Path) -> None:
    # Four streams of 128 numbers; three routers choose 2 experts, one indexer 128 / 4 pools.
    tokens, streams = 2048, 4 * 128 * 2
    chosen = tokens * (3 * 2 * 8 + 32 * 4)
    assert terms(tmp_path, STEADY_GLM, f"{EVERY}=3", KEEP) == {
        KEPT: 2 * tokens * streams,
        REBUILT: 2 * tokens * streams,
        CHOSEN: chosen,
        # None of the last layers of the two groups.
        OUTPUTS: 2 * 2 * tokens * 128 * 2,
    }


def test_memory_terms_of_a_library_model(tmp_path: Path) -> None:
    llama = STEADY.split("model:\n")[0].replace("moe_debug", "llama3_debug")
    # Eight sequences of 2048 tokens, six layers, 256 wide in bfloat16.
    assert terms(tmp_path, llama) == {KEPT: 8 * 2048 * 6 * 256 * 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("recompute") / "corpus")


MODELS = {
    # The trimming that the base recipe may have on is of another model.
    "moe": ["model=moe_debug", "model.n_layers=3", "components.precision_trimming.enabled=false"],
    "glm": ["model=glm_flash_tiny", "model.index_topk=16"],
    "glm_indexers": [
        "model=glm_flash_tiny",
        "model.index_topk=16",
        "components.indexer_training.enabled=true",
    ],
    "glm_only_indexers": [
        "model=glm_flash_tiny",
        "model.index_topk=16",
        "components.indexer_training.enabled=true",
        "components.indexer_training.only=true",
    ],
}


def run_overrides(text: Path, model: str) -> list[str]:
    """Four micro-batches a step, validation at the first, and the experts' load."""
    return [
        *small_overrides(text),
        *MODELS[model],
        "training.global_batch_size=8",
        "training.steps=3",
        "validation.enabled=true",
        "validation.batches=1",
        "metrics.expert_load=true",
    ]


def comparable(run_dir: Path) -> list[dict[str, float]]:
    """The metrics that do not depend on time or memory."""
    wanted = ("train/loss", "train/grad_norm", "validation", "moe/", "indexer/")
    return [{k: v for k, v in line.items() if k.startswith(wanted)} for line in metrics(run_dir)]


def same_checkpoints(one: dict[str, Any], other: dict[str, Any]) -> None:
    names = [name for name in one if isinstance(one[name], torch.Tensor)]
    assert names and one.keys() == other.keys()
    assert [name for name in names if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    ("model", "switches"),
    [
        ("moe", [f"{EVERY}=2"]),
        ("glm", [f"{EVERY}=3", KEEP]),
        ("glm_indexers", [f"{EVERY}=1"]),
        ("glm_only_indexers", [f"{EVERY}=4"]),
    ],
)
def test_a_run_learns_and_counts_the_same_to_the_bit(
    tmp_path: Path, text: Path, model: str, switches: list[str]
) -> None:
    settings = run_overrides(text, model)
    train(tmp_path / "off", settings)
    train(tmp_path / "on", [*settings, ON, *switches])
    expected = checkpoint_state(tmp_path / "off/checkpoint/step-3")
    same_checkpoints(checkpoint_state(tmp_path / "on/checkpoint/step-3"), expected)
    assert any(name.endswith("expert_bias_E") for name in expected)
    assert comparable(tmp_path / "on") == comparable(tmp_path / "off")
    names = {name for line in comparable(tmp_path / "off") for name in line}
    assert names >= {"train/loss", "train/grad_norm", "validation/loss", "moe/idle_experts"}
    loads = [(tmp_path / run / "expert_load.jsonl").read_text() for run in ("on", "off")]
    assert loads[0] == loads[1] and loads[0].count("\n") == 3


def test_a_run_goes_on_from_a_checkpoint_without_recomputation(tmp_path: Path, text: Path) -> None:
    settings = run_overrides(text, "glm")
    train(tmp_path / "whole", settings)
    train(tmp_path / "cut", [*settings, "training.steps=2"])
    train(tmp_path / "cut", [*settings, ON, f"{EVERY}=3", KEEP])
    same_checkpoints(
        checkpoint_state(tmp_path / "cut/checkpoint/step-3"),
        checkpoint_state(tmp_path / "whole/checkpoint/step-3"),
    )


def test_torchtitans_routers_are_replaced_only_while_it_is_on(tmp_path: Path, text: Path) -> None:
    def routers(trainer: RecipeTrainer) -> set[str]:
        modules = (module for part in trainer.model_parts for module in part.modules())
        return {type(m).__name__ for m in modules if type(m).__name__.endswith("Router")}

    settings = [*small_overrides(text), *MODELS["moe"]]
    assert train(tmp_path / "off", settings, use=routers) == {"TokenChoiceTopKRouter"}
    assert train(tmp_path / "on", [*settings, ON], use=routers) == {"KeptChoiceRouter"}
    settings = [*small_overrides(text), *MODELS["glm"]]
    (name,) = train(tmp_path / "glm", [*settings, ON], use=routers)
    assert name == train(tmp_path / "glm_off", settings, use=routers).pop()
