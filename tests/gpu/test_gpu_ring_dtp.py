"""On a GPU: runs with a shared vocabulary learn what torchtitan's loss learns, in less memory."""

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
import torchtitan.tools.utils

from components.titan.trainer import RecipeTrainer
from tests.training import free_port, losses, set_rank, small_overrides, train, write_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

ON = ["components.chunked_loss.enabled=false", "components.ring_dtp.enabled=true"]
SCHEDULES = ("fused", "move_weights", "move_activations")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        *small_overrides(write_corpus(tmp_path_factory.mktemp("data") / "corpus")),
        "model.attention=sdpa",
        "model.vocab_size=321",
        "training.mixed_precision_param=bfloat16",
        "training.global_batch_size=4",
        "validation.enabled=true",
        "validation.every=2",
        "validation.batches=2",
        "checkpoint.enable=false",
        "components.ring_dtp.strip_rows=128",
    ]


@pytest.fixture(scope="module")
def reference(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("reference")
    train(run, overrides)
    return losses(run)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_learns_what_torchtitans_loss_learns(
    schedule: str, overrides: list[str], reference: list[float], tmp_path: Path
) -> None:
    train(tmp_path, [*overrides, *ON, f"components.ring_dtp.schedule={schedule}"])
    assert losses(tmp_path) == pytest.approx(reference, rel=5e-3)


def test_parameters_on_the_host_get_their_gradient_there(
    overrides: list[str], reference: list[float], tmp_path: Path
) -> None:
    def use(trainer: RecipeTrainer) -> None:
        trainer.train()
        weight = trainer.model_parts[0].lm_head.weight
        assert weight.device.type == weight.grad.device.type == "cpu"

    train(tmp_path, [*overrides, *ON, "training.enable_cpu_offload=true"], use=use)
    assert losses(tmp_path) == pytest.approx(reference, rel=5e-3)


def test_the_peak_of_a_large_vocabulary_is_lower(overrides: list[str], tmp_path: Path) -> None:
    def peak(trainer: RecipeTrainer) -> int:
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        return torch.cuda.max_memory_allocated()

    # Logits of 8,192 tokens: 8 chunks of 1,024 against strips of 256, 65,536 wide.
    large = [
        "model.vocab_size=65536",
        "training.seq_len=4096",
        "training.steps=2",
        "training.global_batch_size=2",
        "validation.enabled=false",
        "components.chunked_loss.num_chunks=8",
    ]
    ring = [*ON, "components.ring_dtp.strip_rows=256"]
    with_chunks = train(tmp_path / "chunked", [*overrides, *large], use=peak)
    with_strips = train(tmp_path / "ring", [*overrides, *large, *ring], use=peak)
    saved = (1024 * (2 + 8) - 256 * 2) * 65536
    assert with_chunks - with_strips > saved / 2


def train_rank(rank: int, world_size: int, port: int, run: str, settings: list[str]) -> None:
    """One rank of a run, in a process of its own."""
    from components.titan.device import use_device

    use_device("auto")
    set_rank(rank, world_size, port)
    os.environ["OMP_NUM_THREADS"] = "1"
    train(Path(run), settings)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_gpus_learn_what_torchtitans_loss_learns(
    schedule: str, overrides: list[str], tmp_path: Path
) -> None:
    chosen = [*ON, f"components.ring_dtp.schedule={schedule}"]
    for name, extra in (("chunked", []), ("ring", chosen)):
        arguments = (2, free_port(), str(tmp_path / name), [*overrides, *extra])
        multiprocessing.spawn(train_rank, arguments, nprocs=2)
    assert losses(tmp_path / "ring") == pytest.approx(losses(tmp_path / "chunked"), rel=5e-3)
