"""Small trainings with AdamW's state on the host, and what two of them have in common."""

from pathlib import Path
from typing import Any

import torch

from tests.training import checkpoint_state, small_overrides

NAME = "components.offload_stream_adamw"
ON = [f"{NAME}.enabled=true", f"{NAME}.split=0"]
BF16 = "training.mixed_precision_param=bfloat16"
LEAN = ["components.chunked_loss.enabled=false", "training.local_batch_size=1"]
GLM = ["model=glm_flash_tiny", "model.index_topk=16", "components.indexer_training.enabled=true"]


def settings(corpus: Path, steps: int = 3) -> list[str]:
    """Experts, a fused projection, two parameter groups."""
    groups = "optimizer.no_decay=['norm']"
    return [*small_overrides(corpus), *LEAN, BF16, groups, f"training.steps={steps}"]


def assert_same(left: Any, right: Any, name: str = "") -> None:
    """Equal to the bit, dtypes included."""
    assert type(left) is type(right), name
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right), name
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), name
        for key, value in left.items():
            assert_same(value, right[key], f"{name}.{key}")
    else:
        assert left == right, name


def assert_same_checkpoint(left: Path, right: Path, step: int) -> None:
    folders = (run / f"checkpoint/step-{step}" for run in (left, right))
    first, second = (checkpoint_state(folder) for folder in folders)
    assert any(name.endswith("exp_avg_sq") for name in first["optimizer"])
    assert_same(first, second)


def continued(source: Path, step: int, run: Path) -> Path:
    """A run directory whose latest checkpoint is another run's."""
    (run / "checkpoint").mkdir(parents=True)
    (run / f"checkpoint/step-{step}").symlink_to(source / f"checkpoint/step-{step}")
    return run
