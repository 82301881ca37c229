"""Run small trainings in this process, for tests."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils
import torchtitan.trainer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from components.core.base import Component
from components.titan.build import prepare
from components.titan.trainer import RecipeTrainer
from launch.config.groups import RECIPES
from launch.config.load import load_recipe

Use = Callable[[RecipeTrainer], Any]


def write_corpus(folder: Path, documents: int = 60) -> Path:
    """Ragged text: documents of 10 to 1,000 bytes, so samples hold uneven numbers of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        words = 3 + (index * 37) % 250 if index % 3 == 0 else 3 + index % 11
        text = " ".join(f"w{(index * 7 + k * k) % 97}" for k in range(words))
        (folder / f"{index:03d}.txt").write_text(text)
    return folder


def small_overrides(corpus: Path) -> list[str]:
    """The smallest run that still has experts, several documents per sample and several samples."""
    return [
        "model=moe_debug",
        "data=text",
        f"data.paths=['{corpus}/*.txt']",
        f"data.cache_dir='{corpus.parent}/cache'",
        "data.held_out=0.1",
        "training.seq_len=128",
        "training.local_batch_size=2",
        "training.steps=6",
        "lr_scheduler.total_steps=6",
        "lr_scheduler.warmup_steps=1",
        "components.chunked_loss.num_chunks=4",
        # Tests that want it say so.
        "components.precision_trimming.enabled=false",
        "validation.enabled=false",
        "checkpoint.interval=100",
        "metrics.enable_tensorboard=false",
    ]


def free_port() -> int:
    """A TCP port that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def set_rank(rank: int, world_size: int, port: int) -> None:
    """The environment that torchrun gives a process."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


@contextlib.contextmanager
def without_pauses() -> Iterator[None]:
    """Spare torchtitan's trainer, and nobody else, its two seconds of sleep after training."""
    real = torchtitan.trainer.time
    names = {name: getattr(time, name) for name in dir(time)}
    quick: Any = SimpleNamespace(**names | {"sleep": lambda seconds: None})
    torchtitan.trainer.time = quick
    try:
        yield
    finally:
        torchtitan.trainer.time = real


def train(
    run_dir: Path,
    overrides: list[str],
    recipe: str = "quickstart",
    use: Use | None = None,
    components: Sequence[Component] = (),
) -> Any:
    """Build a trainer in this process (rank and world from the environment) and use it.

    Args:
        run_dir: everything is written there; an existing checkpoint in it is continued.
        use: what to do with the trainer; trains it to the end by default.
        components: further components, already built; only their hooks are called.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    if "RANK" not in os.environ:
        set_rank(0, 1, free_port())
    loaded = load_recipe(RECIPES / f"{recipe}.yaml", overrides)
    device = torchtitan.tools.utils.device_type
    prepared = prepare(loaded.recipe, run_dir, device, int(os.environ["WORLD_SIZE"]))
    prepared.enabled.extend(components)
    try:
        with without_pauses(), prepared.build_and_close() as trainer:
            return (use or RecipeTrainer.train)(trainer)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Every line of a run's metrics.jsonl, in order."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(run_dir: Path) -> list[float]:
    """Training loss of every step, full precision."""
    return [line["train/loss"] for line in metrics(run_dir) if "train/loss" in line]


def checkpoint_state(step_dir: Path) -> dict[str, Any]:
    """Everything in a checkpoint, flat and on the CPU."""
    target = step_dir.parent.parent / f"{step_dir.name}.pt"
    dcp_to_torch_save(step_dir, target)
    return torch.load(target, weights_only=False)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor, whether it was sharded or not."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()
