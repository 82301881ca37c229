"""What watches memory around the steps and micro-batches of a run, as the recipe asks."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from components.titan.memory.leak_guard import LeakGuard
from components.titan.memory.recorder import MemoryRecorder

if TYPE_CHECKING:
    from components.titan.trainer import RecipeTrainer


class Watcher(Protocol):
    """Looks on while a step runs, and changes nothing."""

    def step(self) -> AbstractContextManager[None]:
        """Around a whole step."""
        ...

    def microbatch(self) -> AbstractContextManager[None]:
        """Around forward and backward of one accumulation pass."""
        ...


def watchers(trainer: "RecipeTrainer") -> list[Watcher]:
    """Those that ``debug`` switches on, for this rank."""
    settings = trainer.config.debug
    found: list[Watcher] = []
    if settings.leak_guard:
        found.append(LeakGuard(trainer))
    if settings.memory_timeline is not None and dist.get_rank() == 0:
        folder = Path(trainer.config.dump_folder)
        found.append(MemoryRecorder(trainer, settings.memory_timeline, folder))
    return found
