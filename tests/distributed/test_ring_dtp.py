"""Whole trainings with a shared vocabulary: the losses and gradients of one rank, and checkpoints
that any number of ranks continues, with it or without."""

import os
from pathlib import Path

import pytest
import torch

from components.titan.trainer import RecipeTrainer
from tests.distributed.spawn import run_ranks
from tests.distributed.test_parity import train_and_keep_gradients
from tests.training import checkpoint_state, losses, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

ON = ["components.chunked_loss.enabled=false", "components.ring_dtp.enabled=true"]
DEGREE, SCHEDULE = "components.ring_dtp.degree", "components.ring_dtp.schedule"
EXPERTS = "parallelism.expert_parallel_degree=2"
# Name -> ranks and settings; fewer ranks accumulate, so that every step has the same 8 samples.
LAYOUTS = {
    "experts": (2, [EXPERTS]),
    "context": (
        2,
        ["parallelism.context_parallel_degree=2", f"{SCHEDULE}=move_activations"],
    ),
    "rings": (4, [f"{DEGREE}=2", EXPERTS, f"{SCHEDULE}=move_weights"]),
    "replicas": (4, ["parallelism.data_parallel_replicate_degree=2"]),
    "four": (4, []),
}
FAST = "experts"
slow = [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != FAST]


def overrides(corpus: Path) -> list[str]:
    return [
        *small_overrides(corpus),
        # No multiple of 2 or 4: uneven shards.
        "model.vocab_size=321",
        "training.global_batch_size=8",
        "training.steps=3",
        "training.seq_len=256",
        "checkpoint.interval=2",
        "components.ring_dtp.strip_rows=256",
    ]


def from_seed(folder: Path) -> list[str]:
    return [
        *overrides(folder / "corpus"),
        f"checkpoint.initial_load_path={folder / 'seed/checkpoint/step-0'}",
        "checkpoint.initial_load_model_only=true",
    ]


def train_layout(name: str, out: str) -> None:
    """One rank of a layout's run from the seed."""
    folder = Path(out)
    settings = [*from_seed(folder), *ON, *LAYOUTS[name][1]]
    gradients = train(folder / name, settings, use=train_and_keep_gradients)
    if os.environ["RANK"] == "0":
        torch.save(gradients, folder / f"{name}.pt")


def continue_run(name: str, settings: list[str], out: str) -> None:
    """One rank of a run that goes on where ``FAST`` was after two steps."""
    folder = Path(out)
    train(folder / name, [*overrides(folder / "corpus"), *settings])


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seed, one rank trained from it with torchtitan's loss, and two with a shared vocabulary."""
    folder = tmp_path_factory.mktemp("ring_dtp")
    corpus = write_corpus(folder / "corpus")
    # The head of a seed is not sharded: nothing is.
    seeding = [*overrides(corpus), *ON, "checkpoint.create_seed_checkpoint=true"]
    train(folder / "seed", seeding, use=RecipeTrainer.save_seed)
    gradients = train(folder / "single", from_seed(folder), use=train_and_keep_gradients)
    torch.save(gradients, folder / "single.pt")
    run_ranks(train_layout, 2, folder / "errors", FAST, str(folder))
    return folder


def assert_learns_the_same(folder: Path, name: str) -> None:
    assert losses(folder / name) == pytest.approx(losses(folder / "single"), rel=1e-3)
    expected, found = torch.load(folder / "single.pt"), torch.load(folder / f"{name}.pt")
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        error = (found[key] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        # Experts multiply in bf16 (8 bits), whatever the layout; the order of their sums differs.
        assert error < (1e-2 if "experts" in key else 2e-3), f"{key}: {error:.2e}"


def test_two_ranks_learn_what_one_learns(single: Path) -> None:
    assert_learns_the_same(single, FAST)


@pytest.mark.parametrize("layout", slow)
def test_other_layouts_learn_what_one_rank_learns(layout: str, single: Path) -> None:
    run_ranks(train_layout, LAYOUTS[layout][0], single / "errors", layout, str(single))
    assert_learns_the_same(single, layout)


def to_be_continued(folder: Path, name: str) -> None:
    """Make a run of the second step of ``FAST``."""
    (folder / name / "checkpoint").mkdir(parents=True)
    step = folder / FAST / "checkpoint/step-2"
    (folder / name / "checkpoint/step-2").symlink_to(step)


def assert_continues(folder: Path, name: str) -> None:
    assert losses(folder / name) == pytest.approx(losses(folder / FAST)[2:], rel=2e-3)
    # Step 3 begins with what was read, and ends with the same optimizer state and parameters.
    expected = checkpoint_state(folder / FAST / "checkpoint/step-3")
    found = checkpoint_state(folder / name / "checkpoint/step-3")
    assert found.keys() == expected.keys()
    for key in (k for k in expected if "lm_head" in k):
        if expected[key].ndim < 2:
            assert torch.equal(found[key], expected[key]), key
            continue
        assert found[key].shape == expected[key].shape == (321, 64)
        error = (found[key] - expected[key]).norm() / expected[key].norm()
        assert error < 2e-3, f"{key}: {error:.2e}"


@pytest.mark.parametrize("way", ["with", pytest.param("without", marks=pytest.mark.slow)])
def test_one_rank_continues_what_two_began(way: str, single: Path) -> None:
    to_be_continued(single, way)
    continue_run(way, ON if way == "with" else [], str(single))
    assert_continues(single, way)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[*ON, f"{DEGREE}=2"], ON, []], ids=["2", "4", "without"])
def test_four_ranks_continue_what_two_began(settings: list[str], single: Path) -> None:
    name = f"four_{len(settings)}"
    to_be_continued(single, name)
    run_ranks(continue_run, 4, single / "errors", name, settings, str(single))
    assert_continues(single, name)
