"""Two ranks compute what one computes: loss and every gradient, with uneven valid tokens."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from components.titan.memory.places import clean_name
from components.titan.trainer import RecipeTrainer
from tests.distributed.spawn import run_ranks
from tests.training import full, losses, metrics, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

# Two micro-batches of two samples per step on two ranks: the same eight samples as one rank's step.
GLOBAL_BATCH = 8
CHUNKS = [
    "components.sequence_chunked_moe.enabled=true",
    "components.sequence_chunked_moe.chunk_tokens=100",
]
PLANNED = [
    "parallelism.expert_parallel_degree=2",
    "components.pipelined_llep.enabled=true",
    "components.pipelined_llep.chunk_tokens=100",
    "components.pipelined_llep.minimum_rows=1",
    "components.pipelined_llep.threshold=1",
    "components.layer_recompute.enabled=true",
]
LAYOUTS = {
    "fsdp2": ["parallelism.expert_parallel_degree=1"],
    "fsdp2_ep2": ["parallelism.expert_parallel_degree=2"],
    "fsdp2_ep2_trimmed": [
        "parallelism.expert_parallel_degree=2",
        "components.precision_trimming.enabled=true",
    ],
    "replicate2": [
        "parallelism.data_parallel_replicate_degree=2",
        "parallelism.data_parallel_shard_degree=1",
    ],
    "tensor2": ["parallelism.tensor_parallel_degree=2"],
    "context2": [
        "parallelism.context_parallel_degree=2",
        "components.chunked_loss.num_chunks=4",
    ],
    "tensor2_experts_in_chunks": ["parallelism.tensor_parallel_degree=2", *CHUNKS],
    "tensor2_ep2_experts_in_chunks": [
        "parallelism.tensor_parallel_degree=2",
        "parallelism.expert_parallel_degree=2",
        *CHUNKS,
    ],
    "ep2_planned": [*PLANNED, "debug.leak_guard=true"],
    "tensor2_ep2_planned_in_chunks": ["parallelism.tensor_parallel_degree=2", *PLANNED],
    "context2_ep2_planned_in_chunks": [
        "parallelism.context_parallel_degree=2",
        "components.chunked_loss.num_chunks=4",
        *PLANNED,
    ],
    "ep2_planned_whole_in_no_chunks": [
        "parallelism.expert_parallel_degree=2",
        "components.llep.enabled=true",
        "components.llep.minimum_rows=1",
    ],
}
QUICK = ("fsdp2", "tensor2", "fsdp2_ep2", "ep2_planned")


def overrides(corpus: str, seed: str) -> list[str]:
    return [
        *small_overrides(Path(corpus)),
        f"training.global_batch_size={GLOBAL_BATCH}",
        "training.steps=3",
        # Context parallelism wants a multiple of 128 tokens per rank.
        "training.seq_len=256",
        # Gradients are compared as they are, and small differences must not be scaled up.
        "training.max_norm=1000000.0",
        f"checkpoint.initial_load_path={seed}",
        "checkpoint.initial_load_model_only=true",
    ]


def train_and_keep_gradients(trainer: RecipeTrainer) -> dict[str, torch.Tensor]:
    """Train to the end; return the first step's gradients, whole, by parameter name."""
    original, kept = trainer.train_step, {}

    def step(iterator: Iterator) -> None:
        original(iterator)
        if trainer.step == 1:
            for name, parameter in trainer.model_parts[0].named_parameters():
                kept[clean_name(name)] = full(parameter.grad)

    trainer.train_step = step
    trainer.train()
    return kept


def train_layout(name: str, corpus: str, seed: str, out: str) -> None:
    """One rank of a layout's run."""
    settings = [*overrides(corpus, seed), *LAYOUTS[name]]
    gradients = train(Path(out) / name, settings, use=train_and_keep_gradients)
    if os.environ["RANK"] == "0":
        torch.save(gradients, Path(out) / f"{name}.pt")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seed checkpoint, and one rank trained from it."""
    out = tmp_path_factory.mktemp("parity")
    corpus = write_corpus(out / "corpus")
    seeding = [*small_overrides(corpus), "checkpoint.create_seed_checkpoint=true"]
    train(out / "seed", seeding, use=RecipeTrainer.save_seed)
    settings = overrides(str(corpus), str(out / "seed/checkpoint/step-0"))
    gradients = train(out / "single", settings, use=train_and_keep_gradients)
    torch.save(gradients, out / "single.pt")
    return out


def test_ranks_hold_different_numbers_of_valid_tokens(single: Path) -> None:
    counts = train(
        single / "counts",
        small_overrides(single / "corpus"),
        use=lambda trainer: [
            int((labels != IGNORE_INDEX).sum())
            for _, (_, labels) in zip(range(4), trainer.dataloader, strict=False)
        ],
    )
    assert len(set(counts)) > 1


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in LAYOUTS]
)
def test_losses_and_every_gradient_equal_one_rank(layout: str, single: Path) -> None:
    seed = str(single / "seed/checkpoint/step-0")
    errors = single / f"{layout}_errors"
    run_ranks(train_layout, 2, errors, layout, str(single / "corpus"), seed, str(single))
    assert losses(single / layout) == pytest.approx(losses(single / "single"), rel=1e-3)
    expected, several = torch.load(single / "single.pt"), torch.load(single / f"{layout}.pt")
    assert several.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (several[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        # Experts multiply in bf16 (8 bits), whatever the layout; the order of their sums differs.
        assert error < (1e-2 if "experts" in name else 2e-3), f"{name}: {error:.2e}"
    if layout == "ep2_planned":
        assert_loads(metrics(single / layout))
    # The mean of a rank is over the tokens that it computes, also where ranks share a batch.
    for step in metrics(single / layout):
        assert 1 - 1e-6 <= step["train/loss_max_rank"] / step["train/loss"] < 1.5


def assert_loads(steps: list[dict[str, float]]) -> None:
    """What a run says of its plans; 512 tokens of each rank in 6 chunks, 2 routes per token, at
    most 86 tokens in a chunk."""
    assert len(steps) == 3
    for step in steps:
        assert 2 >= step["llep/rank_load"] >= step["llep/mean_rank_load"] >= 1
        assert step["llep/mean_planned_rank_load"] == step["llep/planned_rank_load"] == 1
        assert step["llep/chunks"] == 6
        # Of 344 that the router could send: chunks are routed nearly as the whole.
        assert 2 * 86 <= step["llep/receive_peak_rows"] <= 1.25 * 2 * 86
        assert step["llep/receive_peak_gib"] == step["llep/receive_peak_rows"] * 64 * 4 / 2**30
        # Whole experts in float32, three matrices of 64 x 64 each, at most one per layer and pass.
        copies = step["llep/copied_gib"] * 2**30 / (3 * 64 * 64 * 4)
        assert copies == int(copies) and 1 <= copies <= 2 * 2 * 2
