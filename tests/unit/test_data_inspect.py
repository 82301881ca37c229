"""The text view of one sample."""

from pathlib import Path
from typing import Any

import pytest

from data.inspect import describe
from tests.unit.test_data_loader import make, take
from tests.unit.test_data_store import Given


def corpus_of(tmp_path: Path, **settings: Any) -> Given:
    texts = {"long.txt": b"abcdefghij" * 10, "a.txt": b"one\ntwo", "b.txt": b"", "c.txt": b"zzz"}
    return Given(texts=texts, cache_dir=str(tmp_path), held_out=0, **settings)


def test_a_sample_is_shown_with_its_boundaries(tmp_path: Path) -> None:
    loader = make(corpus_of(tmp_path, seed=1), seq_len=64)
    assert describe(loader, 1).split("\n") == [
        f"corpus      given, fingerprint {loader.store.digest}",
        f"cache       {loader.store.directory}",
        "tokenizer   byte, vocabulary 258, largest id 257",
        "train       4 documents, 118 tokens, 1.8 samples of 64 tokens",
        "",
        "sample 1 of train",
        "place       1 in packed order",
        "epoch       0, from token 64 of 118",
        "ignored     2 of 64 labels",
        "documents   3",
        "  at         0  long.txt, tokens 48..101",
        "  at        54  a.txt, tokens 0..8",
        "  at        63  b.txt, tokens 0..0",
        "",
        "text",
        "  | hijabcdefghijabcdefghijabcdefghijabcdefghijabcdefghij<eos><bos>one",
        "  | two<eos><bos>",
    ]
    assert loader.sample == 0


def test_the_sample_shown_is_the_sample_trained_on(tmp_path: Path) -> None:
    loader = make(corpus_of(tmp_path, shuffle_window=2), seq_len=40)
    for index in range(4):
        (tokens, _, _), *_ = take(loader, 1)
        text = loader.tokenizer.decode(tokens, skip_special_tokens=False)
        assert "\n".join(f"  | {line}" for line in text.split("\n")) in describe(loader, index)


def test_a_long_sample_shows_its_first_and_last_tokens(tmp_path: Path) -> None:
    texts = {"a": b"A" * 150 + b"B" * 700 + b"C" * 149}
    loader = make(Given(texts=texts, cache_dir=str(tmp_path), held_out=0), seq_len=1001)
    _, _, shown = describe(loader, 0).partition("\n\nsample")
    _, _, shown = shown.partition("\n\n")
    assert shown == (
        f"first tokens\n  | <bos>{'A' * 150}{'B' * 9}\nlast tokens\n  | {'B' * 10}{'C' * 149}<eos>"
    )


def test_padding_is_counted_and_not_shown(tmp_path: Path) -> None:
    loader = make(corpus_of(tmp_path), batch=4, seq_len=100, infinite=False)
    assert loader.end == 4
    partial, empty = describe(loader, 1), describe(loader, 3)
    total = loader.stream.epoch_tokens
    assert f"padding     {200 - total} tokens, from {total - 100} on" in partial
    assert partial.count("<eos>") <= 4
    assert "padding     100 tokens, from 0 on" in empty
    assert "ignored     100 of 100 labels" in empty


def test_many_documents_are_counted_and_some_named(tmp_path: Path) -> None:
    texts = {f"d{i}": b"xy" for i in range(50)}
    loader = make(Given(texts=texts, cache_dir=str(tmp_path)), seq_len=80)
    view = describe(loader, 0)
    assert "documents   20\n" in view
    assert "  and 8 more\n" in view


def test_samples_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    loader = make(corpus_of(tmp_path), seq_len=100, infinite=False)
    with pytest.raises(ValueError, match=r"^sample: 2 does not exist; legal: 0\.\.1$"):
        describe(loader, 2)
    with pytest.raises(ValueError, match=r"^sample: -1 does not exist; legal: 0 or more$"):
        describe(make(corpus_of(tmp_path)), -1)
