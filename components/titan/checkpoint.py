"""Checkpoints: torchtitan's manager with resume, a save on demand and a readable refusal."""

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.tools import filesystem

from components.core.units import Count
from components.titan.export import ExportRules
from components.titan.master_weights import MasterWeights
from components.titan.story import narrate
from components.titan.streamed_optimizer import StreamedOptimizers

# More than this many differing tensors are counted, not listed.
_LISTED = 12


class RunCheckpoints(CheckpointManager):
    """torchtitan's checkpoint manager for a run directory."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        enable: bool = True
        """Whether to save checkpoints."""

        interval: Count = 500
        """Steps between two checkpoints."""

        last_save_model_only: bool = False
        """True: the final checkpoint holds the model alone and cannot be resumed from."""

        initial_load_model_only: bool = False
        """True: `initial_load_path` gives the model alone (a new run from old weights). False: it
        gives the optimizer, the data position and the step as well."""

        initial_load_path: str | None = None
        """Checkpoint that a new run starts from: a folder `.../step-N`, or one with Hugging Face
        weights (see `initial_load_in_hf`). Relative paths start at the current directory."""

        resume: str | None = None
        """Continue a run in its own directory: "latest" (newest run of this recipe that has a
        complete checkpoint) or the path of a run directory. null starts a new run."""

        def __post_init__(self) -> None:
            if self.keep_latest_k != 0 and self.keep_latest_k < 2:
                raise ValueError(f"keep_latest_k is {self.keep_latest_k}; use 0 (all) or 2 or more")
            path = self.initial_load_path
            if path and not filesystem.is_remote(path):
                # torchtitan takes absolute paths alone, and we print relative ones.
                self.initial_load_path = str(Path(path.strip()).absolute())
            CheckpointManager.Config.__post_init__(self)

    _forced: bool = False
    _masters: MasterWeights | None = None

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self.before_save: list[Callable[[], None]] = []
        self._last_saved: int | None = None
        super().__init__(config, **kwargs)
        optimizers = kwargs["optimizers"]
        if self.enable and isinstance(optimizers, StreamedOptimizers):
            self._masters = MasterWeights(kwargs["model_parts"], optimizers)
            self.states[MODEL] = self._masters

    def save_now(self, step: int) -> None:
        """Write a complete, resumable checkpoint of ``step`` whatever the interval says.

        A no-op when checkpoints are off or this step is already on disk.
        """
        # Remembered, not looked up: file systems may show a new file to one rank and not another.
        if not self.enable or self.load_only or self._last_saved == step:
            return
        self._forced = True
        try:
            self.save(step)
        finally:
            self._forced = False
        self.maybe_wait_for_staging()
        self.maybe_wait_for_saving()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._should_save(curr_step, last_step):
            for prepare in self.before_save:
                prepare()
        saved = super()._save(curr_step, last_step)
        if saved:
            self._last_saved = curr_step
        return saved

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._forced or super()._should_save(curr_step, last_step)

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, **options: Any) -> Any:
        """Save; see ``ExportRules`` for what a model's adapter adds to exports."""
        rules = self.sd_adapter if isinstance(self.sd_adapter, ExportRules) else None
        if rules is not None:
            state_dict = self._keep_float32(state_dict, rules)
        if options.get("to_hf", False):
            state_dict = self._on_device(state_dict)
        result = super().dcp_save(state_dict, checkpoint_id, **options)
        if options.get("to_hf", False) and dist.get_rank() == 0:
            folder = Path(checkpoint_id)
            # What each rank wrote; by now torch has merged it on every rank.
            shutil.rmtree(folder / "sharded")
            files = {} if rules is None else rules.export_files(state_dict)
            for name, text in files.items():
                (folder / name).write_text(text)
        return result

    def _keep_float32(self, state_dict: dict[str, Any], rules: ExportRules) -> dict[str, Any]:
        """Undo torchtitan's cast to ``export_dtype`` where the rules say so."""
        source = self.states[MODEL].state_dict()
        kept = {
            name: source[name]
            for name in state_dict.keys() & source.keys()
            if rules.stays_float32(name) and source[name].dtype == torch.float32
        }
        return state_dict | kept

    def _on_device(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """For adapters, which expect a model's tensors there."""
        return state_dict if self._masters is None else self._masters.on_device(state_dict)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load, after comparing the tensors on disk with those of the model.

        Raises:
            ValueError: tensors are missing or have another shape; all of them are named.
        """
        if from_hf:
            state_dict = self._on_device(state_dict)
        else:
            if filesystem.is_remote(checkpoint_id):
                narrate(f"checkpoint: {checkpoint_id} is remote; its tensors are not compared")
            else:
                refuse_other_model(state_dict, Path(checkpoint_id))
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)


def refuse_other_model(state_dict: dict[str, Any], checkpoint: Path) -> None:
    """Compare a model's tensors with a checkpoint's metadata.

    Args:
        state_dict: flat state; entries that are not tensors are not compared.
        checkpoint: folder of a distributed checkpoint.

    Raises:
        ValueError: see ``RunCheckpoints.dcp_load``.
    """
    if not (checkpoint / ".metadata").is_file():
        raise ValueError(
            f"checkpoint: {checkpoint} is no complete checkpoint (it has no .metadata file)"
        )
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    differences = []
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        entry = stored.get(name)
        if entry is None:
            differences.append(f"{name}: not in the checkpoint")
        elif isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            shapes = f"{list(entry.size)} in the checkpoint, {list(tensor.shape)} in the model"
            differences.append(f"{name}: {shapes}")
    if differences:
        shown = "\n  ".join(differences[:_LISTED])
        more = len(differences) - _LISTED
        rest = f"\n  ... and {more} more" if more > 0 else ""
        raise ValueError(
            f"checkpoint: {checkpoint} belongs to another model "
            f"({len(differences)} tensors differ):\n  {shown}{rest}\n"
            "to load another checkpoint, change checkpoint.initial_load_path; to load this one, "
            "give model the sizes it was saved with"
        )
    refuse_missing_optimizer_state(state_dict, stored.keys(), checkpoint)


def refuse_missing_optimizer_state(
    state_dict: dict[str, Any], stored: Collection[str], checkpoint: Path
) -> None:
    """Compare the parameters that an optimizer is to continue with those the checkpoint knows.

    Raises:
        ValueError: some have no state there, because they were frozen or the checkpoint holds a
            model alone; with the way out.
    """
    optimizer = state_dict.get("optimizer")
    if not isinstance(optimizer, Stateful):
        return
    wanted = (name for name in optimizer.state_dict() if name.startswith("state."))
    missing = sorted(name for name in wanted if f"optimizer.{name}" not in stored)
    if missing and not any(name.startswith("optimizer.") for name in stored):
        raise ValueError(
            f"checkpoint: {checkpoint} holds a model alone, without optimizer state; start a new "
            f"run with checkpoint.initial_load_path={checkpoint} and "
            "checkpoint.initial_load_model_only=true, which makes a new optimizer, or use a "
            "checkpoint that was not saved with checkpoint.last_save_model_only=true"
        )
    if missing:
        parameters = sorted({name.split(".", 1)[1].rsplit(".", 1)[0] for name in missing})
        raise ValueError(
            f"checkpoint: {checkpoint} has no optimizer state for {len(parameters)} parameters "
            f"that are trained now and were frozen then ({', '.join(parameters[:3])}, ...); use "
            "checkpoint.initial_load_model_only=true, which starts a new optimizer"
        )
