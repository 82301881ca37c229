"""Kernels of others, read from a folder that the user fetched: nothing of them is in here."""

import functools
import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The folder given by ``--peers``; None where there is none."""

    folder: Path | None = None

    def missing(self, files: Iterable[str]) -> list[str]:
        """Those of ``files`` that are not there."""
        return [name for name in files if self.folder is None or not self.path(name).is_file()]

    def path(self, name: str) -> Path:
        """Where a file of the folder is.

        Raises:
            ValueError: no folder was given.
        """
        if self.folder is None:
            raise ValueError(f"--peers: not given, {name!r} is looked for in its folder")
        return self.folder / name

    def load(self, name: str) -> ModuleType:
        """Import a file, once per process; it may import its neighbours by their bare names.

        Raises:
            ValueError: no folder was given.
            ImportError: the file, or something it imports, is not there.
        """
        return _load(self.path(name).resolve())


@functools.cache
def _load(path: Path) -> ModuleType:
    with _alone(path.parent):
        return importlib.import_module(path.stem)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Find modules in ``folder`` first, and forget afterwards that these names were imported.

    Their names are as plain as ``utils``: one that is imported already is put back.
    """
    names = [path.stem for path in folder.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
