"""Tokenizers: bytes with nothing to set up, or a directory holding a ``tokenizer.json``."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

BYTE = "byte"
_LEGAL = f"'{BYTE}' or a directory with tokenizer.json and tokenizer_config.json"


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes as tokens: ids 0..255 are bytes, 256 begins a document, 257 ends it."""

    bos_id: int = 256
    vocab_size: int = 258

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, config: Config | None = None, *, tokenizer_path: str = "") -> None:
        """Accept, and ignore, the path that the trainer gives every tokenizer."""
        super().__init__()
        self.eos_id: int = 257

    def encode(self, text: str | bytes, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Return the token ids of ``text``; a string is encoded as UTF-8 first."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        head = [self.bos_id] if add_bos else []
        tail = [self.eos_id] if add_eos else []
        return [*head, *data, *tail]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``.

        Bytes that are no UTF-8 (a character cut at the edge of a sample) become U+FFFD. The two
        special tokens are dropped, or written ``<bos>`` and ``<eos>`` on request.

        Raises:
            ValueError: an id outside 0..257.
        """
        names = {self.bos_id: b"<bos>", self.eos_id: b"<eos>"}
        pieces = bytearray()
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {int(token)} is outside 0..{self.vocab_size - 1}")
            if token < self.bos_id:
                pieces.append(token)
            elif not skip_special_tokens:
                pieces += names[int(token)]
        return pieces.decode("utf-8", errors="replace")

    def get_vocab_size(self) -> int:
        """Return 258: the bytes and two special tokens."""
        return self.vocab_size


def tokenizer_problems(name: str) -> list[str]:
    """Say why ``data.tokenizer: name`` cannot work, by looking at small files only."""
    if name == BYTE:
        return []
    directory = Path(name)
    if not name or not (directory / "tokenizer.json").is_file():
        return [f"data.tokenizer: {name!r} has no tokenizer.json; legal: {_LEGAL}"]
    config = directory / "tokenizer_config.json"
    if not config.is_file():
        return [f"data.tokenizer: {name!r} has no tokenizer_config.json; legal: {_LEGAL}"]
    try:
        declared = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"data.tokenizer: {str(config)!r} is not JSON: {error}"]
    if not isinstance(declared, dict) or not declared.get("eos_token"):
        return [
            f"data.tokenizer: {str(config)!r} declares no 'eos_token'; "
            "documents need one to end with"
        ]
    return []


def config_of(name: str) -> BaseTokenizer.Config:
    """Return what builds the tokenizer ``data.tokenizer: name`` asks for; give it ``name``."""
    return ByteTokenizer.Config() if name == BYTE else HuggingFaceTokenizer.Config()


def build_tokenizer(name: str) -> BaseTokenizer:
    """Return the tokenizer that ``data.tokenizer: name`` asks for.

    Raises:
        ValueError: ``name`` is neither ``byte`` nor a usable tokenizer directory.
    """
    problems = tokenizer_problems(name)
    if problems:
        raise ValueError("\n".join(problems))
    return config_of(name).build(tokenizer_path=name)


def tokenizer_identity(tokenizer: BaseTokenizer) -> str:
    """Return a short name that changes whenever the tokenizer's output could.

    The place where its files lie is no part of it.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return BYTE
    parts = (tokenizer.tokenizer.to_str(), tokenizer.bos_id, tokenizer.eos_id)
    return "tokenizer-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def require_same_tokenizer(name: str, tokenizer: BaseTokenizer) -> None:
    """Check that ``tokenizer`` is the one that ``data.tokenizer: name`` asks for.

    Raises:
        ValueError: the trainer was given another one, so model and data would disagree.
    """
    if isinstance(tokenizer, ByteTokenizer):
        present = BYTE
    else:
        present = str(getattr(tokenizer, "tokenizer_path", type(tokenizer).__name__))
    same = present == name or (BYTE not in (present, name) and _real(present) == _real(name))
    if not same:
        raise ValueError(
            f"data.tokenizer: {name!r} is not the tokenizer of this run, which is {present!r}; "
            "both must be the same"
        )


def _real(path: str) -> Path:
    return Path(path).resolve()


def encode_document(tokenizer: BaseTokenizer, text: bytes) -> np.ndarray:
    """Return ``[BOS] text [EOS]`` as int64 ids, shape (n,), n >= 1.

    BOS is left out when the tokenizer has none. ``text`` is UTF-8.
    """
    if isinstance(tokenizer, ByteTokenizer):
        ids = np.empty(len(text) + 2, dtype=np.int64)
        ids[0], ids[-1] = tokenizer.bos_id, tokenizer.eos_id
        ids[1:-1] = np.frombuffer(text, dtype=np.uint8)
        return ids
    tokens = tokenizer.encode(text.decode("utf-8"), add_bos=True, add_eos=True)
    return np.asarray(tokens, dtype=np.int64)
