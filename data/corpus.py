"""Corpora: where documents come from, in which order, and what identifies them.

A corpus is a settings object (the ``data`` section of a recipe). It lists and reads documents; it
knows nothing of tokens, samples or ranks.
"""

import hashlib
import json
import os
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from components.core.units import Count
from data.files import list_files, pattern_problems, read_lines, read_whole
from data.tokenizer import tokenizer_problems

_SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "encodings", "idle_test", "lib-dynload", "site-packages",
    "test", "tests",
}  # fmt: skip
_INSTALL_SPECIFIC = ("_sysconfig", "sitecustomize", "usercustomize")
_STDLIB_SUFFIXES = (".py", ".txt", ".rst", ".html")
_STDLIB_BYTES = range(256, 2**20)


class Document(NamedTuple):
    """One document: a name that is unique in its corpus, and UTF-8 text."""

    name: str
    text: bytes


@dataclass(kw_only=True, slots=True)
class CorpusSettings(ABC):
    """What every corpus has. Subclasses say where the documents are."""

    kind: ClassVar[str]

    tokenizer: str = "byte"
    """"byte" (258 ids, nothing to set up) or a directory holding tokenizer.json."""

    held_out: float = 0.05
    """Fraction of the documents kept for validation, chosen by name; 0 keeps none."""

    seed: int = 0
    """Order of documents and samples: another seed, another order in every epoch."""

    shuffle_window: Count = 1024
    """Samples shuffled among each other before batches are formed; 1 keeps the packed order.

    Without it a batch holds consecutive pieces of one document, and trains worse for it.
    """

    cache_dir: str = "outputs/cache"
    """Directory for the tokenised corpus, built once; safe to delete."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yield every document, always in the same order.

        Raises:
            ValueError: a file is not what the settings say; names the key and the file.
        """

    @abstractmethod
    def _sources(self) -> list[tuple[str, Path]]:
        """Return (name, path) of the files behind the documents, in order."""

    def _content_settings(self) -> list[str]:
        """Return the settings, beyond the files, that change the documents."""
        return []

    def check(self) -> list[str]:
        """Return what is wrong with the settings, one message each, without reading documents."""
        problems = tokenizer_problems(self.tokenizer)
        if not 0 <= self.held_out < 1:
            problems.append(
                f"data.held_out: {self.held_out} is not a fraction of the documents; "
                "legal: 0 <= held_out < 1"
            )
        if self.shuffle_window < 1:
            problems.append(
                f"data.shuffle_window: {self.shuffle_window} is not a number of samples above 0; "
                "1 keeps the packed order"
            )
        return problems

    def fingerprint(self, tokenizer_identity: str) -> str:
        """Return a directory name that changes with anything the tokens depend on.

        Files count by name, size and modification time, so this is quick for any corpus size.
        """
        digest = hashlib.sha256()
        settings = [self.kind, tokenizer_identity, *self._content_settings()]
        digest.update(json.dumps(settings).encode())
        for name, path in self._sources():
            status = path.stat()
            line = json.dumps([name, status.st_size, status.st_mtime_ns])
            digest.update(line.encode())
        return f"{self.kind}-{digest.hexdigest()[:16]}"


@dataclass(kw_only=True, slots=True)
class StdlibCorpus(CorpusSettings):
    """The running Python's standard library: its sources and texts, one document per file.

    Installed packages, tests, character tables (``encodings``), generated build settings and files
    that are not UTF-8 are left out.
    Names are relative to the library, so that the order and the split do not depend on the place
    of the installation. Other Python versions hold other text.
    """

    kind: ClassVar[str] = "stdlib"

    def documents(self) -> Iterator[Document]:
        """Yield the files by name; see the base class."""
        for name, path in self._sources():
            text = path.read_bytes()
            try:
                text.decode("utf-8")
            except UnicodeDecodeError:
                continue
            yield Document(name, text)

    def check(self) -> list[str]:
        """See the base class; also finds a Python that ships without its sources."""
        problems = CorpusSettings.check(self)
        if not self._sources():
            problems.append(
                f"data: the standard library at {sysconfig.get_path('stdlib')!r} holds no sources; "
                "use another Python, or data=text with data.paths"
            )
        return problems

    def _content_settings(self) -> list[str]:
        return [sys.version]

    def _sources(self) -> list[tuple[str, Path]]:
        root = Path(sysconfig.get_path("stdlib"))
        found = []
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = [name for name in subfolders if _is_stdlib_folder(name)]
            for file in files:
                path = Path(folder, file)
                if _is_stdlib_document(path):
                    found.append((path.relative_to(root).as_posix(), path))
        return sorted(found)


def _is_stdlib_folder(name: str) -> bool:
    return name not in _SKIPPED_FOLDERS and not name.startswith((".", "config-"))


def _is_stdlib_document(path: Path) -> bool:
    return (
        path.suffix in _STDLIB_SUFFIXES
        and not path.name.startswith(_INSTALL_SPECIFIC)
        and path.is_file()
        and path.stat().st_size in _STDLIB_BYTES
    )


@dataclass(kw_only=True, slots=True)
class FileCorpus(CorpusSettings):
    """A corpus in local files, named by glob patterns."""

    paths: list[str] = field(default_factory=list)
    """Glob patterns of local files ("**" crosses folders); relative to the working directory."""

    def check(self) -> list[str]:
        """See the base class; also finds patterns without a file."""
        return [*CorpusSettings.check(self), *pattern_problems(self.paths)]

    def _sources(self) -> list[tuple[str, Path]]:
        """Names are relative to the folder that holds all files, so a corpus may be moved whole."""
        files = list_files(self.paths)
        if not files:
            return []
        root = os.path.commonpath([path.resolve().parent for path in files])
        return [(path.resolve().relative_to(root).as_posix(), path) for path in files]


@dataclass(kw_only=True, slots=True)
class TextCorpus(FileCorpus):
    """Local UTF-8 text files (also .gz, .xz, .zst ...), one document per file, named by its path
    below the folder that holds all of them.

    Line ends are read as newlines.
    """

    kind: ClassVar[str] = "text"

    def documents(self) -> Iterator[Document]:
        """Yield the files by path; see the base class."""
        sources = self._sources()
        texts = read_whole([path for _, path in sources], self.cache_dir)
        for (name, _), text in zip(sources, texts, strict=True):
            yield Document(name, text.encode("utf-8"))


@dataclass(kw_only=True, slots=True)
class JsonlCorpus(FileCorpus):
    """Local JSON Lines files, one document per line, named ``<file>:<line number>``."""

    kind: ClassVar[str] = "jsonl"

    field: str = "text"
    """Key of each JSON object that holds the text of the document."""

    def documents(self) -> Iterator[Document]:
        """Yield the lines, file by file in path order; blank lines are no documents."""
        for name, path in self._sources():
            for number, line in enumerate(read_lines(path, self.cache_dir), start=1):
                if line.strip():
                    yield Document(f"{name}:{number}", self._text(path, number, line))

    def check(self) -> list[str]:
        """See the base class; also refuses an empty field name."""
        problems = FileCorpus.check(self)
        if not self.field:
            problems.append("data.field: '' names no key; write the key that holds the text")
        return problems

    def _content_settings(self) -> list[str]:
        return [self.field]

    def _text(self, path: Path, number: int, line: str) -> bytes:
        where = f"{str(path)!r} line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"data.paths: {where} is not JSON ({error}); "
                "JSON Lines has one JSON object on each line"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"data.paths: {where} is a JSON {_json_type(row)}; "
                "JSON Lines has one JSON object on each line"
            )
        if self.field not in row:
            raise ValueError(f"data.field: {where} has no key {self.field!r}; it has {sorted(row)}")
        value = row[self.field]
        if not isinstance(value, str):
            raise ValueError(
                f"data.field: {where} holds a {_json_type(value)} under {self.field!r}; "
                "it must be a string"
            )
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"data.field: {where} holds half of a surrogate pair under {self.field!r}, "
                "which is not text"
            ) from error


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
