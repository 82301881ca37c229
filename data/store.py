"""Documents tokenised once, and shared between processes as a memory map."""

import hashlib
import logging
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer

from data.cachedir import build_once, read_meta
from data.corpus import CorpusSettings
from data.split import held_out_mask, name_hash
from data.tokenizer import encode_document, tokenizer_identity

logger = logging.getLogger(__name__)

Split = Literal["train", "validation"]

_VERSION = 1
_PROGRESS_SECONDS = 10


@dataclass(frozen=True, slots=True)
class TokenDocuments:
    """Some of the documents of a token array.

    Attributes:
        tokens: every token of the store, one unsigned dtype, shape (tokens,); often a memory map.
        offsets: where each document of the store begins, and the end, int64, shape (all + 1,).
        chosen: which documents these are, int64, shape (documents,), ascending.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    chosen: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each chosen document, int64, shape (documents,)."""
        return self.offsets[self.chosen + 1] - self.offsets[self.chosen]

    @property
    def token_count(self) -> int:
        """Tokens in all chosen documents."""
        return int(self.lengths.sum())


class TokenStore:
    """Every document of a corpus as tokens: ``[BOS] text [EOS]``, one after the other.

    Both splits live in one token file, and a split is a choice of documents: changing
    ``data.held_out`` or ``data.seed`` tokenises nothing again.

    Attributes:
        directory: the cache directory of this corpus and tokenizer.
        digest: identity of the content (tokens, document boundaries and names), whatever the
            place and times of the files.
        max_id: the largest token id that occurs.
        tokens: uint16 or uint32 (by vocabulary size), shape (tokens,), read-only memory map.
        offsets: int64, shape (documents + 1,), read-only memory map.
    """

    def __init__(self, directory: Path) -> None:
        """Map an existing store; use ``open_store`` to build a missing one."""
        meta = read_meta(directory)
        self.directory = directory
        self.digest: str = meta["digest"]
        self.max_id: int = meta["max_id"]
        self.tokens = np.memmap(directory / "tokens.bin", dtype=meta["dtype"], mode="r")
        self.offsets: np.ndarray = np.load(directory / "tokens.offsets.npy", mmap_mode="r")
        self._names = np.memmap(directory / "names.bin", dtype=np.uint8, mode="r")
        self._name_offsets = np.load(directory / "names.offsets.npy", mmap_mode="r")
        self._hashes = np.load(directory / "hashes.npy", mmap_mode="r")

    def __len__(self) -> int:
        """Return the number of documents in both splits."""
        return len(self.offsets) - 1

    def name(self, document: int) -> str:
        """Return the name of document 0 <= ``document`` < len(self)."""
        begin, end = self._name_offsets[document : document + 2]
        return self._names[begin:end].tobytes().decode("utf-8", "surrogateescape")

    def split(self, split: Split, held_out: float) -> TokenDocuments:
        """Return the documents of one split.

        Raises:
            ValueError: unknown split, or one that ``held_out`` leaves without documents.
        """
        if split not in get_args(Split):
            raise ValueError(f"split: {split!r} is unknown; legal: {', '.join(get_args(Split))}")
        if split == "validation" and held_out == 0:
            raise ValueError(
                "data.held_out: 0 holds no document out, so there is no validation split; "
                "write a fraction above 0, or turn validation off"
            )
        mask = held_out_mask(self._hashes, held_out)
        chosen = np.flatnonzero(mask if split == "validation" else ~mask)
        return TokenDocuments(tokens=self.tokens, offsets=self.offsets, chosen=chosen)


def open_store(corpus: CorpusSettings, tokenizer: BaseTokenizer) -> TokenStore:
    """Return the tokenised ``corpus``, tokenising it first unless that was done before.

    Any number of processes may call this at once: one builds, the others wait and share the
    result. A damaged cache is built again, with a warning.

    Raises:
        ValueError: a document cannot be read or tokenised, or there is none.
    """
    fingerprint = corpus.fingerprint(tokenizer_identity(tokenizer))
    directory = Path(corpus.cache_dir) / fingerprint

    def build(scratch: Path) -> dict[str, Any]:
        logger.info("tokenising the %s corpus into %s", corpus.kind, directory)
        return _write_store(scratch, corpus, tokenizer)

    build_once(directory, _VERSION, build)
    return TokenStore(directory)


class _RaggedWriter:
    """Arrays of one dtype, appended to ``<name>.bin``; their offsets follow when it is closed."""

    def __init__(self, directory: Path, name: str, dtype: str) -> None:
        self._file = (directory / f"{name}.bin").open("wb")
        self._offsets_path = directory / f"{name}.offsets.npy"
        self._dtype = dtype
        self.offsets = array("q", [0])

    def append(self, values: np.ndarray) -> bytes:
        data = values.astype(self._dtype).tobytes()
        self._file.write(data)
        self.offsets.append(self.offsets[-1] + len(values))
        return data

    def close(self) -> None:
        self._file.close()
        np.save(self._offsets_path, np.asarray(self.offsets, dtype=np.int64))


def _write_store(
    directory: Path, corpus: CorpusSettings, tokenizer: BaseTokenizer
) -> dict[str, Any]:
    """Tokenise into ``directory``; memory is one document and 24 bytes for each before it."""
    vocab_size = tokenizer.get_vocab_size()
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"
    tokens = _RaggedWriter(directory, "tokens", dtype)
    names = _RaggedWriter(directory, "names", "u1")
    hashes, max_id, digest = array("Q"), 0, hashlib.sha256()
    reported = time.monotonic()
    for document in corpus.documents():
        ids = _checked(encode_document(tokenizer, document.text), document.name, vocab_size)
        digest.update(tokens.append(ids))
        encoded_name = document.name.encode("utf-8", "surrogateescape")
        names.append(np.frombuffer(encoded_name, dtype=np.uint8))
        hashes.append(name_hash(document.name))
        max_id = max(max_id, int(ids.max()))
        if time.monotonic() - reported > _PROGRESS_SECONDS:
            reported = time.monotonic()
            logger.info("tokenised %d documents, %d tokens", len(hashes), tokens.offsets[-1])
    if not hashes:
        raise ValueError(f"data: the {corpus.kind} corpus has no documents; see `data.paths`")
    tokens.close()
    names.close()
    np.save(directory / "hashes.npy", np.asarray(hashes, dtype=np.uint64))
    digest.update(tokens.offsets.tobytes() + hashes.tobytes())
    return {"dtype": dtype, "max_id": max_id, "digest": digest.hexdigest()[:32]}


def _checked(ids: np.ndarray, name: str, vocab_size: int) -> np.ndarray:
    """Refuse ids that no embedding of the tokenizer's size could hold."""
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        found = f"ids {ids.min()}..{ids.max()}" if len(ids) else "no token at all"
        raise ValueError(
            f"data.tokenizer: document {name!r} became {found}; "
            f"legal: 0..{vocab_size - 1}, with an end-of-document token"
        )
    return ids
