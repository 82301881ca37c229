"""The run directory: where everything of one run is kept."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FROZEN = "recipe.yaml"
STATUS = "status.json"


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run's directory."""

    path: Path

    @property
    def frozen(self) -> Path:
        """The resolved recipe that every rank reads."""
        return self.path / FROZEN

    @property
    def logs(self) -> Path:
        """One log file per rank."""
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tb"

    def checkpoints(self, folder: str = "checkpoint") -> dict[int, Path]:
        """Complete checkpoints by step."""
        found = {}
        for path in (self.path / folder).glob("step-*"):
            step = re.fullmatch(r"step-(\d+)", path.name)
            if step and (path / ".metadata").is_file():
                found[int(step.group(1))] = path
        return dict(sorted(found.items()))

    def exports(self, folder: str = "checkpoint") -> dict[int, Path]:
        """Folders with weights in Hugging Face's format, by step."""
        found = {}
        for path in (self.path / folder).glob("step-*"):
            step = re.fullmatch(r"step-(\d+)", path.name)
            if step and (path / "model.safetensors.index.json").is_file():
                found[int(step.group(1))] = path
        return found

    def write_status(self, **entries: Any) -> None:
        """Record how the run ended (state, step, signal)."""
        (self.path / STATUS).write_text(json.dumps(entries) + "\n")

    def forget_status(self) -> None:
        """Remove the record of an earlier launch, so that a new one cannot be mistaken for it."""
        (self.path / STATUS).unlink(missing_ok=True)

    def read_status(self) -> dict[str, Any]:
        """What ``write_status`` last recorded; empty before the run has ended."""
        file = self.path / STATUS
        return json.loads(file.read_text()) if file.is_file() else {}
