"""The token store: contents, splits, identity, repair."""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.corpus import CorpusSettings, Document, JsonlCorpus, TextCorpus
from data.store import TokenDocuments, TokenStore, open_store
from data.tokenizer import build_tokenizer, encode_document
from tests.unit.test_data_tokenizer import write_tokenizer

BYTE = build_tokenizer("byte")


@dataclass(kw_only=True, slots=True)
class Given(CorpusSettings):
    """Documents from memory; counts how often they are read."""

    kind = "given"

    texts: dict[str, bytes] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    def documents(self) -> Iterator[Document]:
        self.reads.append(self.kind)
        for name, text in self.texts.items():
            yield Document(name, text)

    def _sources(self) -> list[tuple[str, Path]]:
        return []

    def _content_settings(self) -> list[str]:
        return [repr(self.texts)]


def given(tmp_path: Path, count: int = 40, **settings: Any) -> Given:
    texts = {f"document {i}": f"text {i} ".encode() * (i % 7) for i in range(count)}
    return Given(texts=texts, cache_dir=str(tmp_path / "cache"), **settings)


def texts_of(documents: TokenDocuments) -> list[bytes]:
    """Read documents back; checks that each is [BOS] bytes [EOS]."""
    found = []
    for document in documents.chosen:
        begin, end = documents.offsets[document : document + 2]
        ids = documents.tokens[begin:end].astype(int).tolist()
        assert (ids[0], ids[-1]) == (256, 257)
        found.append(bytes(ids[1:-1]))
    return found


def test_documents_come_back_with_their_names(tmp_path: Path) -> None:
    corpus = given(tmp_path)
    store = open_store(corpus, BYTE)
    assert len(store) == 40
    assert [store.name(i) for i in range(40)] == list(corpus.texts)
    assert texts_of(store.split("train", 0)) == list(corpus.texts.values())
    assert store.max_id == 257
    assert store.directory == Path(corpus.cache_dir, corpus.fingerprint("byte"))


def test_tokens_are_a_read_only_map_of_the_file(tmp_path: Path) -> None:
    store = open_store(given(tmp_path), BYTE)
    assert isinstance(store.tokens, np.memmap)
    assert store.tokens.dtype == np.uint16
    assert not store.tokens.flags.writeable
    assert store.split("train", 0.1).tokens is store.tokens


def test_a_corpus_is_tokenised_once(tmp_path: Path) -> None:
    corpus = given(tmp_path)
    first = open_store(corpus, BYTE)
    other = open_store(replace(corpus, seed=3, held_out=0.4), BYTE)
    assert len(corpus.reads) == 1
    assert first.directory == other.directory
    assert first.digest == other.digest


def test_splits_share_nothing_and_lose_nothing(tmp_path: Path) -> None:
    corpus = given(tmp_path)
    store = open_store(corpus, BYTE)
    for fraction in (1e-9, 0.05, 0.5, 0.999999):
        train, validation = store.split("train", fraction), store.split("validation", fraction)
        assert len(train.chosen) > 0
        assert len(validation.chosen) > 0
        both = np.concatenate([train.chosen, validation.chosen])
        assert sorted(both.tolist()) == list(range(40))
        assert train.token_count + validation.token_count == len(store.tokens)


def test_held_out_documents_stay_held_out_when_the_corpus_grows(tmp_path: Path) -> None:
    def held_out(corpus: Given) -> set[str]:
        store = open_store(corpus, BYTE)
        return {store.name(i) for i in store.split("validation", 0.2).chosen}

    small, large = given(tmp_path, count=40), given(tmp_path, count=80)
    assert held_out(small) == held_out(large) & set(small.texts)


def test_splits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    store = open_store(given(tmp_path, count=1), BYTE)
    assert store.split("train", 0).chosen.tolist() == [0]
    with pytest.raises(ValueError) as refusal:
        store.split("validation", 0)
    assert str(refusal.value) == (
        "data.held_out: 0 holds no document out, so there is no validation split; "
        "write a fraction above 0, or turn validation off"
    )
    with pytest.raises(ValueError, match="^data.held_out: 0.1 cannot divide a corpus of 1 doc"):
        store.split("train", 0.1)
    with pytest.raises(ValueError, match="^split: 'test' is unknown; legal: train, validation$"):
        store.split("test", 0.1)  # type: ignore[arg-type]


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refusal:
        open_store(given(tmp_path, count=0), BYTE)
    assert str(refusal.value) == "data: the given corpus has no documents; see `data.paths`"


def test_a_truncated_store_is_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = given(tmp_path)
    first = open_store(corpus, BYTE)
    size = len(first.tokens) * 2
    os.truncate(first.directory / "tokens.bin", size - 2)
    with caplog.at_level(logging.WARNING):
        again = open_store(corpus, BYTE)
    assert f"(tokens.bin has {size - 2} bytes instead of {size}); building" in caplog.text
    assert texts_of(again.split("train", 0)) == list(corpus.texts.values())
    assert again.digest == first.digest
    assert len(corpus.reads) == 2


def test_the_digest_is_of_content_and_not_of_place_or_time(tmp_path: Path) -> None:
    def digest(folder: str, texts: dict[str, bytes]) -> str:
        corpus = Given(texts=texts, cache_dir=str(tmp_path / folder))
        return open_store(corpus, BYTE).digest

    first = digest("a", {"x": b"one", "y": b"two"})
    assert digest("b", {"x": b"one", "y": b"two"}) == first
    assert digest("a", {"x": b"one", "z": b"two"}) != first
    assert digest("a", {"x": b"onet", "y": b"wo"}) != first
    assert digest("a", {"y": b"two", "x": b"one"}) != first
    assert digest("a", {"x": b"one", "y": b"twi"}) != first


def test_the_digest_knows_where_documents_end(tmp_path: Path) -> None:
    name = write_tokenizer(tmp_path / "tokenizer")

    def opened(texts: dict[str, bytes]) -> TokenStore:
        corpus = Given(texts=texts, tokenizer=name, cache_dir=str(tmp_path / "cache"))
        return open_store(corpus, build_tokenizer(name))

    first = opened({"x": b"a</s><s>b", "y": b"c"})
    other = opened({"x": b"a", "y": b"b</s><s>c"})
    assert first.tokens.tolist() == other.tokens.tolist()
    assert first.digest != other.digest


def test_touched_files_are_tokenised_again_to_the_same_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    corpus = TextCorpus(paths=[str(path)], cache_dir=str(tmp_path / "cache"))
    first = open_store(corpus, BYTE)
    os.utime(path, ns=(1, 1))
    again = open_store(corpus, BYTE)
    assert again.directory != first.directory
    assert again.digest == first.digest


def test_documents_end_where_they_end_and_not_at_an_end_token_in_the_text(tmp_path: Path) -> None:
    name = write_tokenizer(tmp_path / "tokenizer")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "the cat</s>the hat"}\n{"text": "the bat"}\n')
    corpus = JsonlCorpus(paths=[str(path)], tokenizer=name, cache_dir=str(tmp_path / "cache"))
    tokenizer = build_tokenizer(name)
    store = open_store(corpus, tokenizer)
    assert len(store) == 2
    texts = [store.tokens[store.offsets[i] : store.offsets[i + 1]].tolist() for i in range(2)]
    assert [tokenizer.decode(text, skip_special_tokens=False) for text in texts] == [
        "<s>the cat</s>the hat</s>",
        "<s>the bat</s>",
    ]
    assert store.max_id < tokenizer.get_vocab_size()


def test_large_vocabularies_take_four_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BYTE, "get_vocab_size", lambda: 2**16 + 1)
    monkeypatch.setattr(
        "data.store.encode_document", lambda t, text: encode_document(t, text) + 2**16 - 257
    )
    store = open_store(given(tmp_path), BYTE)
    assert store.tokens.dtype == np.uint32
    assert store.max_id == 2**16
    assert store.tokens.max() == 2**16


def test_ids_beyond_the_vocabulary_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BYTE, "get_vocab_size", lambda: 257)
    with pytest.raises(ValueError) as refusal:
        open_store(given(tmp_path), BYTE)
    assert str(refusal.value) == (
        "data.tokenizer: document 'document 0' became ids 256..257; "
        "legal: 0..256, with an end-of-document token"
    )


def test_progress_of_a_long_build_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("data.store._PROGRESS_SECONDS", -1)
    with caplog.at_level(logging.INFO):
        store = open_store(given(tmp_path), BYTE)
    assert "tokenising the given corpus into" in caplog.text
    assert f"tokenised 40 documents, {len(store.tokens)} tokens" in caplog.text


def test_names_may_hold_any_character(tmp_path: Path) -> None:
    names = ["caf\u00e9", "b\udce9", "line\nline", ""]
    corpus = Given(texts={name: b"x" for name in names}, cache_dir=str(tmp_path))
    store = open_store(corpus, BYTE)
    assert [store.name(i) for i in range(4)] == names
    assert isinstance(store, TokenStore)
