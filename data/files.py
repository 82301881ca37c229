"""Local files named by glob patterns, read as a stream through ``datasets``."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


def list_files(patterns: Sequence[str]) -> list[Path]:
    """Return the files that match any of ``patterns``, each once, sorted by path."""
    found = {match for pattern in patterns for match in _matches(pattern)}
    return [Path(name) for name in sorted(found)]


def pattern_problems(patterns: Sequence[str]) -> list[str]:
    """Say, one message each, which ``data.paths`` patterns name no file."""
    if not patterns:
        return ["data.paths: [] names no file; write glob patterns such as ['corpus/**/*.txt']"]
    problems = []
    for pattern in patterns:
        if os.path.isdir(os.path.expanduser(pattern)):
            hint = os.path.join(pattern, "**", "*.txt")
            problems.append(
                f"data.paths: {pattern!r} is a directory; write which files in it, like {hint!r}"
            )
        elif not _matches(pattern):
            problems.append(f"data.paths: {pattern!r} matches no file, seen from {os.getcwd()!r}")
    return problems


def _matches(pattern: str) -> list[str]:
    names = glob.glob(os.path.expanduser(pattern), recursive=True)
    return [os.path.normpath(name) for name in names if os.path.isfile(name)]


def read_whole(paths: Sequence[Path], cache_dir: str) -> Iterator[str]:
    """Yield the text of each file of ``paths``, in order; compressed files are unpacked.

    Raises:
        ValueError: a file is not UTF-8.
    """
    if not paths:
        return
    rows = _rows(paths, cache_dir, "document")
    for path in paths:
        yield _next_row(rows, path)


def read_lines(path: Path, cache_dir: str) -> Iterator[str]:
    """Yield the lines of one file without their line ends; compressed files are unpacked.

    Raises:
        ValueError: the file is not UTF-8.
    """
    rows = _rows([path], cache_dir, "line")
    while True:
        try:
            yield _next_row(rows, path)
        except StopIteration:
            return


def _rows(paths: Sequence[Path], cache_dir: str, sample_by: str) -> Iterator[dict[str, str]]:
    # Imported here because it takes a second, which the default corpus need not pay.
    # `load_dataset` would ask the network for a download count even for local files.
    from datasets import IterableDataset

    patterns = [glob.escape(str(path)) for path in paths]
    locks = os.path.join(cache_dir, "datasets")
    return iter(IterableDataset.from_text(patterns, cache_dir=locks, sample_by=sample_by))


def _next_row(rows: Iterator[dict[str, str]], path: Path) -> str:
    try:
        return next(rows)["text"]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.paths: {str(path)!r} is not UTF-8 ({error}); convert it, or leave it out"
        ) from error
