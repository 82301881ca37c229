"""Train a recipe for a few steps on fixed text; `python -m tests.golden` writes its losses down.

The default corpus is the running Python's library, which differs between Python versions, so golden
runs read generated text instead. Everything else is the recipe as it ships.
"""

import tempfile
from pathlib import Path

from tests.training import losses, train, write_corpus

HERE = Path(__file__).parent

STEPS = 4
CASES = {
    "quickstart": [],
    "quickstart_stock": [
        "components.chunked_loss.enabled=false",
        "components.precision_trimming.enabled=false",
    ],
}
"""Case -> overrides of `quickstart`."""


def run(case: str) -> list[float]:
    """Losses (nats per token) of the first steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder / "corpus", documents=400)
        overrides = [
            "data=text",
            f"data.paths=['{corpus}/*.txt']",
            f"data.cache_dir='{folder}/cache'",
            "data.shuffle_window=1",
            "training.local_batch_size=1",
            f"training.steps={STEPS}",
            "lr_scheduler.total_steps=60",
            "validation.enabled=false",
            "checkpoint.enable=false",
            "metrics.enable_tensorboard=false",
            *CASES[case],
        ]
        train(folder / "run", overrides)
        return losses(folder / "run")


def file_of(case: str) -> Path:
    """Where a case's losses are kept, one per line."""
    return HERE / f"{case}.txt"


def read(case: str) -> list[float]:
    """The losses on record."""
    return [float(line) for line in file_of(case).read_text().split()]


def write(case: str) -> None:
    """Put the present losses on record."""
    file_of(case).write_text("".join(f"{loss:.6f}\n" for loss in run(case)))
