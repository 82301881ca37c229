"""Records one step's memory and draws it (``debug.memory_timeline``)."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn

from components.titan.memory.allocator import AllocatorHistory, join
from components.titan.memory.host import host_storages
from components.titan.memory.ledger import Ledger
from components.titan.memory.phases import PhaseLog, sort_blocks
from components.titan.memory.places import Place, PlaceTracker, clean_name
from components.titan.memory.storages import plain_tensors
from components.titan.memory.timeline import Block, Timeline
from components.titan.story import narrate

if TYPE_CHECKING:
    from components.titan.trainer import RecipeTrainer

NAME = "memory_timeline"
SNAPSHOT = "memory_snapshot.pickle"


class MemoryRecorder:
    """Records the memory of one step of this rank and writes pictures of it.

    A CPU run is counted by its tensors. A CUDA run is read off the allocator's history, so that
    kernels' workspaces are in it; the tensors give the names.
    """

    def __init__(self, trainer: "RecipeTrainer", step: int, folder: Path) -> None:
        """
        Args:
            trainer: to be recorded.
            step: its number; steps count from 1.
            folder: where memory_timeline.png, .html and .txt go.
        """
        self._trainer = trainer
        self._step = step
        self._folder = folder
        self._now: StepRecord | None = None
        self._begun = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a whole step; draws when it is the one, also when it ran out of memory."""
        if not self._begun and self._trainer.step > self._step:
            begin = self._trainer.step
            narrate(f"debug.memory_timeline: step {self._step} is over, the run began at {begin}")
        self._begun = True
        if self._trainer.step != self._step:
            yield
            return
        record = self._now = StepRecord(self._trainer)
        try:
            record.start()
            yield
        except torch.OutOfMemoryError:
            self._write(record.stop(self._folder / SNAPSHOT), ", OUT OF MEMORY")
            raise
        except BaseException:
            record.abandon()
            raise
        else:
            self._write(record.stop(self._folder / SNAPSHOT), "")
        finally:
            self._now = None

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """Around forward and backward of one accumulation pass."""
        if self._now is not None:
            self._now.tracker.at("data")
        yield
        if self._now is not None:
            self._now.mark_gradients()
            self._now.tracker.at("optimizer")

    def _write(self, timeline: Timeline, note: str) -> None:
        from components.titan.memory.page import write_page
        from components.titan.memory.picture import write_picture
        from components.titan.memory.report import report

        timeline.title += note
        write_picture(timeline, self._folder / f"{NAME}.png")
        write_page(timeline, self._folder / f"{NAME}.html")
        (self._folder / f"{NAME}.txt").write_text(report(timeline))
        narrate(f"memory of step {self._step}: see {NAME}.png, .html and .txt in {self._folder}")


class StepRecord:
    """The books of one step: the tracker, the ledger and, on CUDA, the allocator's history."""

    def __init__(self, trainer: "RecipeTrainer") -> None:
        self._trainer = trainer
        self._parts: list[nn.Module] = trainer.model_parts
        self._origin: float | None = None
        self._log = PhaseLog()
        self._hooked: set[int] = set()
        self._handles: list[Any] = []
        device = trainer.device.type
        self._history = AllocatorHistory() if device == "cuda" else None
        self.tracker = PlaceTracker(self._parts)
        self.tracker.on_change.append(lambda place: self._log.change(place, self._clock()))
        self.tracker.on_enter.append(self._entered)
        self._ledger = Ledger(device, self._clock, lambda: self.tracker.here, host_storages())

    def start(self) -> None:
        """Take stock and begin."""
        self._ledger.open()
        self._mark_state()
        self.mark_gradients()
        if self._history is not None:
            self._history.start()
        self.tracker.attach()
        self._origin = time.time_ns() / 1e9
        self._log.change(Place("data"), 0.0)

    def stop(self, snapshot: Path) -> Timeline:
        """The step is over (or out of memory): close the books.

        Args:
            snapshot: where torch's own snapshot goes, on CUDA.
        """
        duration = self._clock()
        self._mark_state()
        self.mark_gradients()
        self._close()
        blocks = [entry.block for entry in self._ledger.entries]
        source = "tensor accounting"
        if self._history is not None and self._origin is not None:
            placed = self._history.stop(snapshot, self._origin)
            join(placed, self._ledger.entries, self._log.at)
            blocks, source = [block for _, block in placed], "the CUDA allocator's history"
        return self._timeline(blocks, source, duration)

    def abandon(self) -> None:
        """Close the books without a result."""
        self._close()
        if self._history is not None:
            self._history.cancel()

    def _close(self) -> None:
        self._ledger.close()
        self.tracker.detach()
        for handle in self._handles:
            handle.remove()

    def mark_gradients(self) -> None:
        """Gradients that stand now; FSDP's are set without autograd's hooks."""
        for name, parameter in self._parameters():
            self._ledger.mark(parameter.grad, "gradients", name)

    def _mark_state(self) -> None:
        names = {parameter: name for name, parameter in self._parameters()}
        for parameter, name in names.items():
            self._ledger.mark(parameter, "parameters", name)
        for part in self._parts:
            for name, buffer in part.named_buffers():
                self._ledger.mark(buffer, "parameters", clean_name(name))
        for optimizer in self._trainer.optimizers:
            for parameter, state in optimizer.state.items():
                self._ledger.mark(state, "optimizer state", names.get(parameter, ""))

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self._parts:
            for name, parameter in part.named_parameters():
                yield clean_name(name), parameter

    def _entered(self, module: nn.Module, name: str, inputs: Any, again: bool) -> None:
        for key, parameter in module.named_parameters(prefix=name, recurse=False):
            self._ledger.mark(parameter, "parameters", key)
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                hook = self._gradient_hook(key)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        if name and name == Place("forward", name).layer:
            # Without a graph nothing tells the hidden state from what layers share: it comes first.
            given = plain_tensors(inputs[0][:1] if again else inputs)
            self._ledger.mark([t for t in given if again or t.requires_grad], "kept")

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda parameter: self._ledger.mark(parameter.grad, "gradients", name)

    def _clock(self) -> float:
        """Seconds since the step began; before that, 0."""
        return 0.0 if self._origin is None else max(time.time_ns() / 1e9 - self._origin, 0.0)

    def _timeline(self, blocks: list[Block], source: str, duration: float) -> Timeline:
        sort_blocks(blocks, self._log.phases)
        trainer = self._trainer
        spec = trainer.config.model_spec
        name = f"{spec.name} {spec.flavor}" if spec is not None else "model"
        ranks = f", rank 0 of {dist.get_world_size()}" if dist.get_world_size() > 1 else ""
        return Timeline(
            title=f"{name}: device memory in step {trainer.step} ({trainer.device.type}{ranks})",
            source=source,
            blocks=blocks,
            phases=self._log.phases,
            modules=[(at, place.module) for at, place in self._log.places],
            duration=duration,
        )
