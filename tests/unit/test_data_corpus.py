"""Corpora: what they read, in which order, what identifies them, what they refuse."""

import gzip
import json
import os
import socket
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.corpus import CorpusSettings, Document, JsonlCorpus, StdlibCorpus, TextCorpus


def jsonl(tmp_path: Path, content: str | bytes, **settings: Any) -> JsonlCorpus:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return JsonlCorpus(paths=[str(path)], cache_dir=str(tmp_path / "cache"), **settings)


def text(tmp_path: Path, **files: bytes) -> TextCorpus:
    for name, content in files.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    return TextCorpus(paths=[f"{tmp_path}/*.txt"], cache_dir=str(tmp_path / "cache"))


def refusal(corpus: CorpusSettings) -> str:
    with pytest.raises(ValueError) as caught:
        list(corpus.documents())
    return str(caught.value)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of our own, installed nowhere."""
    root = tmp_path / "lib"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    return root


def put(root: Path, name: str, content: bytes = b"x = 1  # some text\n" * 20) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_the_standard_library_is_real_text_in_name_order() -> None:
    documents = list(StdlibCorpus().documents())
    names = [document.name for document in documents]
    assert names == sorted(set(names))
    assert {"argparse.py", "asyncio/base_events.py", "pydoc_data/topics.py"} <= set(names)
    assert sum(len(document.text) for document in documents) > 4_000_000
    for folder in ("site-packages", "test", "tests", "idle_test", "__pycache__", "encodings"):
        assert not any(folder in name.split("/") for name in names)
    assert StdlibCorpus().check() == []


def test_the_standard_library_leaves_out_what_is_no_library_text(library: Path) -> None:
    for name in ("b.py", "a/z.py", "LICENSE.txt", "a/notes.rst", "help.html"):
        put(library, name)
    for name in (
        "a/__pycache__/b.py", "site-packages/p.py", "dist-packages/p.py", "test/t.py",
        "a/tests/t.py", "idlelib/idle_test/t.py", "config-3.11-x86/m.py", "_sysconfigdata_x.py",
        "sitecustomize.py", "b.pyc", "data.bin",
    ):  # fmt: skip
        put(library, name)
    put(library, "latin.py", b"# caf\xe9\n" * 100)
    put(library, "empty.py", b"")
    put(library, "huge.py", b"#" * 2**20)
    names = [document.name for document in StdlibCorpus().documents()]
    assert names == ["LICENSE.txt", "a/notes.rst", "a/z.py", "b.py", "help.html"]


def test_a_python_without_sources_is_found_early(library: Path) -> None:
    put(library, "os.pyc")
    assert StdlibCorpus().check() == [
        f"data: the standard library at {str(library)!r} holds no sources; "
        "use another Python, or data=text with data.paths"
    ]


def test_text_files_are_documents_named_by_path(tmp_path: Path) -> None:
    corpus = text(tmp_path, b=b"second\r\nline", a="caf\u00e9".encode(), c=b"")
    with gzip.open(tmp_path / "d.txt.gz", "wb") as file:
        file.write(b"packed")
    (tmp_path / "folder.txt").mkdir()
    corpus.paths += [f"{tmp_path}/**/*.gz", f"{tmp_path}/a.*"]
    assert list(corpus.documents()) == [
        Document("a.txt", "caf\u00e9".encode()),
        Document("b.txt", b"second\nline"),
        Document("c.txt", b""),
        Document("d.txt.gz", b"packed"),
    ]


def test_a_text_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    message = refusal(text(tmp_path, a=b"fine", b=b"caf\xe9", c=b"fine"))
    assert message == (
        f"data.paths: '{tmp_path}/b.txt' is not UTF-8 ('utf-8' codec can't decode byte 0xe9 in "
        "position 3: unexpected end of data); convert it, or leave it out"
    )


def test_json_lines_are_documents_named_by_line(tmp_path: Path) -> None:
    rows = ['{"text": "a\\nb", "id": 1}', "", '{"id": "x", "text": "2020-01-01"}\r', '{"text": ""}']
    corpus = jsonl(tmp_path, "\n".join(rows))
    name = Path(corpus.paths[0]).name
    assert list(corpus.documents()) == [
        Document(f"{name}:1", b"a\nb"),
        Document(f"{name}:3", b"2020-01-01"),
        Document(f"{name}:4", b""),
    ]


def test_a_corpus_moved_whole_keeps_its_names(tmp_path: Path) -> None:
    for folder in ("here", "elsewhere/deep"):
        for name in ("a/x.txt", "b/x.txt"):
            (tmp_path / folder / name).parent.mkdir(parents=True)
            (tmp_path / folder / name).write_text(name)
    here = TextCorpus(paths=[f"{tmp_path}/here/**/*.txt"])
    moved = TextCorpus(paths=[f"{tmp_path}/elsewhere/**/*.txt"])
    assert list(here.documents()) == list(moved.documents())
    assert [document.name for document in here.documents()] == ["a/x.txt", "b/x.txt"]


def test_json_lines_files_with_odd_names_and_compression_are_read(tmp_path: Path) -> None:
    (tmp_path / "b [1]*.jsonl").write_text('{"body": "plain"}\n')
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"body": "packed"}\n')
    corpus = JsonlCorpus(
        paths=[f"{tmp_path}/*.jsonl*"], field="body", cache_dir=str(tmp_path / "cache")
    )
    assert [document.text for document in corpus.documents()] == [b"packed", b"plain"]


def test_a_long_jsonl_file_is_read_in_order(tmp_path: Path) -> None:
    rows = [f"{number} " + "x" * 5_000 for number in range(5_000)]
    corpus = jsonl(tmp_path, "".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert [document.text.decode() for document in corpus.documents()] == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": oops}', "data.paths: {at} is not JSON (Expecting value: line 1 column 10 "
         "(char 9)); JSON Lines has one JSON object on each line"),
        ('[{"text": "a"}]', "data.paths: {at} is a JSON array; "
         "JSON Lines has one JSON object on each line"),
        ('{"b": "x", "a": 1}', "data.field: {at} has no key 'text'; it has ['a', 'b']"),
        ('{"text": null}', "data.field: {at} holds a null under 'text'; it must be a string"),
        ('{"text": 3}', "data.field: {at} holds a number under 'text'; it must be a string"),
        ('{"text": "\\ud800"}', "data.field: {at} holds half of a surrogate pair under 'text', "
         "which is not text"),
    ],
)  # fmt: skip
def test_bad_lines_are_refused_with_their_place(tmp_path: Path, line: str, message: str) -> None:
    corpus = jsonl(tmp_path, '{"text": "fine"}\n\n' + line + "\n")
    assert refusal(corpus) == message.format(at=f"{corpus.paths[0]!r} line 3")


def test_a_jsonl_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    message = refusal(jsonl(tmp_path, b'{"text": "\xe9"}\n'))
    assert message.startswith(f"data.paths: '{tmp_path}/a.jsonl' is not UTF-8 (")


def test_local_files_are_read_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def record(*arguments: object, **_: object) -> None:
        asked.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", record)
    monkeypatch.setattr(socket.socket, "connect", record)
    assert len(list(jsonl(tmp_path, '{"text": "a"}').documents())) == 1
    assert len(list(text(tmp_path, a=b"a").documents())) == 1
    assert asked == []


def test_settings_are_judged_together_and_early(tmp_path: Path) -> None:
    corpus = JsonlCorpus(
        paths=["nowhere/*.jsonl", str(tmp_path)],
        field="",
        tokenizer="bite",
        held_out=1.0,
        shuffle_window=0,
    )
    assert corpus.check() == [
        "data.tokenizer: 'bite' has no tokenizer.json; "
        "legal: 'byte' or a directory with tokenizer.json and tokenizer_config.json",
        "data.held_out: 1.0 is not a fraction of the documents; legal: 0 <= held_out < 1",
        "data.shuffle_window: 0 is not a number of samples above 0; 1 keeps the packed order",
        f"data.paths: 'nowhere/*.jsonl' matches no file, seen from {os.getcwd()!r}",
        f"data.paths: {str(tmp_path)!r} is a directory; "
        f"write which files in it, like {str(tmp_path / '**' / '*.txt')!r}",
        "data.field: '' names no key; write the key that holds the text",
    ]
    assert replace(corpus, held_out=-0.1).check()[1].startswith("data.held_out: -0.1 is not")
    assert TextCorpus().check() == [
        "data.paths: [] names no file; write glob patterns such as ['corpus/**/*.txt']"
    ]
    assert text(tmp_path, a=b"a").check() == []


def test_checking_reads_no_document(tmp_path: Path) -> None:
    assert text(tmp_path, a=b"\xff\xff").check() == []


def test_the_fingerprint_follows_content_and_token_settings(tmp_path: Path) -> None:
    corpus = jsonl(tmp_path, '{"text": "a"}\n')
    first = corpus.fingerprint("byte")
    assert first.startswith("jsonl-")
    assert corpus.fingerprint("byte") == first
    same = replace(corpus, held_out=0.5, seed=7, shuffle_window=1, cache_dir="elsewhere")
    assert same.fingerprint("byte") == first

    others = {
        first,
        corpus.fingerprint("tokenizer-1"),
        replace(corpus, field="b").fingerprint("byte"),
    }
    path = Path(corpus.paths[0])
    os.utime(path, ns=(1, 1))
    others.add(corpus.fingerprint("byte"))
    path.write_text('{"text": "ab"}\n')
    os.utime(path, ns=(1, 1))
    others.add(corpus.fingerprint("byte"))
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    corpus.paths = [f"{tmp_path}/*.jsonl"]
    others.add(corpus.fingerprint("byte"))
    assert len(others) == 6


def test_the_standard_library_fingerprint_follows_the_python_version(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(library, "a.py")
    first = StdlibCorpus().fingerprint("byte")
    monkeypatch.setattr("sys.version", "3.99")
    assert StdlibCorpus().fingerprint("byte") != first


@pytest.mark.parametrize("corpus", [StdlibCorpus, TextCorpus, JsonlCorpus])
def test_the_config_group_shows_every_setting_with_its_default(
    corpus: type[CorpusSettings],
) -> None:
    kind = corpus.kind
    path = Path(__file__).parents[2] / "conf" / "data" / f"{kind}.yaml"
    settings = yaml.safe_load(path.read_text())
    assert settings.pop("_target_") == f"data.corpus.{corpus.__name__}"
    defaults = corpus()
    assert settings == {item.name: getattr(defaults, item.name) for item in fields(defaults)}


def test_a_corpus_of_ones_own_needs_two_methods(tmp_path: Path) -> None:
    @dataclass(kw_only=True, slots=True)
    class Primes(CorpusSettings):
        kind = "primes"

        def documents(self) -> Iterator[Document]:
            return iter([Document("primes", b"2 3 5 7")])

        def _sources(self) -> list[tuple[str, Path]]:
            return []

    assert Primes().check() == []
    assert Primes().fingerprint("byte") != Primes().fingerprint("other")
