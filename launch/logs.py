"""Logging of one rank: the story on the console, everything in a file."""

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from components.titan.story import STORY


class _ConsoleHandler(logging.Handler):
    """Writes above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except (OSError, ValueError):
            # The terminal or the reader is gone. The run goes on; the log file has everything.
            logging.getLogger().removeHandler(self)


# Warnings of torchtitan that say nothing about this run. They stay in the log file.
_KNOWN_HARMLESS = (
    "ENV[",
    "Error running lspci",
    "Peak flops undefined for: CPU",
    # Our loader pads the split, so that all ranks end together.
    "Setting validation steps to -1 might cause hangs",
)


class _Story(logging.Filter):
    """Lets our narration through, and warnings from anyone."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == STORY:
            return True
        if record.exc_info:
            # Tracebacks belong into the file; the launcher ends with the error itself.
            return False
        text = record.getMessage()
        return record.levelno >= logging.WARNING and not text.startswith(_KNOWN_HARMLESS)


def configure(file: Path, first_rank: bool) -> None:
    """Log everything to ``file``; on the first rank also tell the story on the console."""
    file.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.INFO)
    to_file = logging.FileHandler(file)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root.addHandler(to_file)
    if first_rank:
        console = _ConsoleHandler()
        console.addFilter(_Story())
        console.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        root.addHandler(console)
    logging.captureWarnings(True)
    # Python warnings are for developers; they stay in the file.
    logging.getLogger("py.warnings").addFilter(lambda record: _to_info(record))


def _to_info(record: logging.LogRecord) -> bool:
    record.levelno, record.levelname = logging.INFO, "INFO"
    return True
