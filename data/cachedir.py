"""A directory of derived files that many processes share: built once, whole or absent.

The directory appears under its name by one rename, after everything in it is on disk. A killed
build leaves a ``.building`` folder that the next one removes. Checksums tell a damaged directory
from a good one.
"""

import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

META = "meta.json"
_BLOCK_BYTES = 16 * 2**20
_CHECKED_BLOCKS = 16
_LOCK_REPORT_SECONDS = 30


def build_once(directory: Path, version: int, build: Callable[[Path], dict[str, Any]]) -> None:
    """Make sure that ``directory`` holds an undamaged result of ``build``.

    One process builds while the others wait.

    Args:
        directory: where the files are to be.
        version: layout of the files; a directory of another version is built again.
        build: writes the files into the empty directory it is given and returns facts for
            ``meta.json``.
    """
    if find_fault(directory, version) is None:
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory):
        fault = find_fault(directory, version)
        if fault is None:
            return
        if directory.exists():
            logger.warning("data cache %s is damaged (%s); building it again", directory, fault)
        _build(directory, version, build)


def read_meta(directory: Path) -> dict[str, Any]:
    """Return the facts that were recorded with the files."""
    return json.loads((directory / META).read_text(encoding="utf-8"))


def find_fault(directory: Path, version: int) -> str | None:
    """Return why the files cannot be used, or None.

    Every size is compared. Contents are compared whole up to 256 MiB a file, and in 16 blocks of
    16 MiB, evenly spread, beyond that.
    """
    try:
        meta = read_meta(directory)
        found, recorded = meta["version"], meta["files"].items()
    except FileNotFoundError:
        return f"no {META}"
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"{META} is not readable"
    if found != version:
        return f"layout version {found} instead of {version}"
    for name, expected in recorded:
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if not _same_blocks(path, expected["crc32"]):
            return f"{name} has changed contents"
    return None


def _same_blocks(path: Path, checksums: list[int]) -> bool:
    count = len(checksums)
    checked = min(count, _CHECKED_BLOCKS)
    blocks = {i * (count - 1) // max(checked - 1, 1) for i in range(checked)}
    with path.open("rb") as file:
        for block in sorted(blocks):
            file.seek(block * _BLOCK_BYTES)
            if zlib.crc32(file.read(_BLOCK_BYTES)) != checksums[block]:
                return False
    return True


def _build(directory: Path, version: int, build: Callable[[Path], dict[str, Any]]) -> None:
    scratch = directory.with_name(directory.name + ".building")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    facts = build(scratch)
    files = {path.name: _describe_file(path) for path in sorted(scratch.iterdir())}
    meta = scratch / META
    meta.write_text(json.dumps({**facts, "version": version, "files": files}), encoding="utf-8")
    _to_disk(meta)
    if directory.exists():
        shutil.rmtree(directory)
    os.replace(scratch, directory)


def _describe_file(path: Path) -> dict[str, Any]:
    _to_disk(path)
    checksums = []
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksums.append(zlib.crc32(block))
    return {"bytes": path.stat().st_size, "crc32": checksums}


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    lock = FileLock(directory.with_name(directory.name + ".lock"))
    while True:
        try:
            lock.acquire(timeout=_LOCK_REPORT_SECONDS)
            break
        except Timeout:
            logger.info("waiting for another process to build data cache %s", directory)
    try:
        yield
    finally:
        lock.release()
