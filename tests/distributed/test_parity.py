"""Two ranks compute what one computes: loss and every gradient, with uneven valid tokens."""

import os
from pathlib import Path

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from components.titan.trainer import RecipeTrainer
from tests.distributed.spawn import run_ranks
from tests.training import full, losses, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

# Two micro-batches of two samples per step on two ranks: the same eight samples as one rank's step.
GLOBAL_BATCH = 8
LAYOUTS = {
    "fsdp2": ["parallelism.expert_parallel_degree=1"],
    "fsdp2_ep2": ["parallelism.expert_parallel_degree=2"],
    "replicate2": [
        "parallelism.data_parallel_replicate_degree=2",
        "parallelism.data_parallel_shard_degree=1",
    ],
    "context2": [
        "parallelism.context_parallel_degree=2",
        "components.chunked_loss.num_chunks=4",
    ],
}


def overrides(corpus: str, seed: str) -> list[str]:
    return [
        *small_overrides(Path(corpus)),
        f"training.global_batch_size={GLOBAL_BATCH}",
        "training.steps=3",
        # Gradients are compared as they are, and small differences must not be scaled up.
        "training.max_norm=1000000.0",
        f"checkpoint.initial_load_path={seed}",
        "checkpoint.initial_load_model_only=true",
    ]


def one_step_gradients(trainer: RecipeTrainer) -> dict[str, torch.Tensor]:
    """Train one step and return the gradient it used, whole, by parameter name."""
    trainer.checkpointer.load()
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    named = trainer.model_parts[0].named_parameters()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): full(parameter.grad)
        for name, parameter in named
    }


def on_every_layout(corpus: str, seed: str, out: str) -> None:
    """All layouts in one set of processes: starting processes costs more than training."""
    for name, extra in LAYOUTS.items():
        train(Path(out) / name, [*overrides(corpus, seed), *extra])
        gradients = train(
            Path(out) / f"{name}_gradients",
            [*overrides(corpus, seed), *extra],
            use=one_step_gradients,
        )
        if os.environ["RANK"] == "0":
            torch.save(gradients, Path(out) / f"{name}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parity")
    corpus = write_corpus(out / "corpus")
    seeding = [*small_overrides(corpus), "checkpoint.create_seed_checkpoint=true"]
    train(out / "seed", seeding, use=RecipeTrainer.save_seed)
    seed = str(out / "seed/checkpoint/step-0")
    single = overrides(str(corpus), seed)
    train(out / "single", single)
    torch.save(
        train(out / "single_gradients", single, use=one_step_gradients), out / "single.pt"
    )
    run_ranks(on_every_layout, 2, out / "errors", str(corpus), seed, str(out))
    return out


def test_ranks_hold_different_numbers_of_valid_tokens(results: Path) -> None:
    counts = train(
        results / "counts",
        small_overrides(results / "corpus"),
        use=lambda trainer: [
            int((labels != IGNORE_INDEX).sum())
            for _, (_, labels) in zip(range(4), trainer.dataloader, strict=False)
        ],
    )
    assert len(set(counts)) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_one_rank(layout: str, results: Path) -> None:
    assert losses(results / layout) == pytest.approx(losses(results / "single"), rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_equals_one_rank(layout: str, results: Path) -> None:
    single = torch.load(results / "single.pt")
    several = torch.load(results / f"{layout}.pt")
    assert several.keys() == single.keys()
    for name, expected in single.items():
        error = (several[name] - expected).norm() / expected.norm().clamp(min=1e-12)
        # Experts multiply in bf16 (8 bits), whatever the layout; the order of their sums differs.
        assert error < (1e-2 if "experts" in name else 2e-3), f"{name}: {error:.2e}"
