"""Byte tokenizer, tokenizer directories, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.tokenizer import (
    ByteTokenizer,
    build_tokenizer,
    encode_document,
    require_same_tokenizer,
    tokenizer_identity,
    tokenizer_problems,
)

LEGAL = "legal: 'byte' or a directory with tokenizer.json and tokenizer_config.json"


def write_tokenizer(directory: Path, merges: int = 20, **config: object) -> str:
    """Write a small byte-pair tokenizer and return its directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + merges,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the hat and the bat sat " * 5], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory)


def test_byte_tokenizer_builds_as_the_trainer_builds_it() -> None:
    tokenizer = ByteTokenizer.Config().build(tokenizer_path="no/such/place")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.get_vocab_size() == 258
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)


def test_bytes_are_their_own_ids() -> None:
    tokenizer = build_tokenizer("byte")
    assert tokenizer.encode("a\u00e9") == [97, 0xC3, 0xA9]
    assert tokenizer.encode(b"\x00\xff", add_bos=True, add_eos=True) == [256, 0, 255, 257]


def test_every_byte_survives_a_round_trip() -> None:
    tokenizer = build_tokenizer("byte")
    text = "".join(chr(code) for code in (*range(1, 0x250), 0x20AC, 0x1F40D))
    assert tokenizer.decode(tokenizer.encode(text, add_bos=True, add_eos=True)) == text


def test_decode_shows_special_tokens_on_request_and_survives_cut_characters() -> None:
    tokenizer = build_tokenizer("byte")
    assert tokenizer.decode([256, 104, 105, 257], skip_special_tokens=False) == "<bos>hi<eos>"
    assert tokenizer.decode(np.array([0xA9, 104])) == "\ufffdh"


@pytest.mark.parametrize("token", [-1, 258])
def test_decode_refuses_ids_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match=rf"^token id {token} is outside 0\.\.257$"):
        build_tokenizer("byte").decode([token])


def test_documents_begin_with_bos_and_end_with_eos(tmp_path: Path) -> None:
    assert encode_document(build_tokenizer("byte"), b"ab").tolist() == [256, 97, 98, 257]
    assert encode_document(build_tokenizer("byte"), b"").tolist() == [256, 257]
    directory = build_tokenizer(write_tokenizer(tmp_path))
    ids = encode_document(directory, b"the cat")
    assert (ids[0], ids[-1]) == (directory.bos_id, directory.eos_id)
    assert ids.dtype == np.int64
    assert directory.decode(ids.tolist(), skip_special_tokens=True) == "the cat"


def test_a_directory_without_bos_gives_documents_without_bos(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_tokenizer(tmp_path, bos_token=None))
    assert encode_document(tokenizer, b"").tolist() == [tokenizer.eos_id]


def test_unknown_tokenizers_are_refused_with_what_is_legal(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refusal:
        build_tokenizer("bytes")
    assert str(refusal.value) == f"data.tokenizer: 'bytes' has no tokenizer.json; {LEGAL}"
    assert tokenizer_problems("") == [f"data.tokenizer: '' has no tokenizer.json; {LEGAL}"]

    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_problems(str(tmp_path)) == [
        f"data.tokenizer: {str(tmp_path)!r} has no tokenizer_config.json; {LEGAL}"
    ]


def test_a_tokenizer_directory_needs_an_end_token(tmp_path: Path) -> None:
    name = write_tokenizer(tmp_path, eos_token=None)
    config = tmp_path / "tokenizer_config.json"
    assert tokenizer_problems(name) == [
        f"data.tokenizer: {str(config)!r} declares no 'eos_token'; documents need one to end with"
    ]
    config.write_text("{")
    (problem,) = tokenizer_problems(name)
    assert problem.startswith(f"data.tokenizer: {str(config)!r} is not JSON: ")


def test_identity_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    first = build_tokenizer(write_tokenizer(tmp_path / "a"))
    moved = build_tokenizer(write_tokenizer(tmp_path / "b"))
    larger = build_tokenizer(write_tokenizer(tmp_path / "c", merges=3))
    without_bos = build_tokenizer(write_tokenizer(tmp_path / "d", bos_token=None))
    identities = [tokenizer_identity(t) for t in (first, moved, larger, without_bos)]
    assert identities[0] == identities[1]
    assert len(set(identities)) == 3
    assert tokenizer_identity(build_tokenizer("byte")) == "byte"


def test_the_tokenizer_of_the_run_must_be_the_one_of_the_data(tmp_path: Path) -> None:
    name = write_tokenizer(tmp_path / "tok")
    byte, directory = build_tokenizer("byte"), build_tokenizer(name)
    require_same_tokenizer("byte", byte)
    require_same_tokenizer(f"{tmp_path}/x/../tok", directory)
    with pytest.raises(ValueError) as refusal:
        require_same_tokenizer("byte", directory)
    assert str(refusal.value) == (
        f"data.tokenizer: 'byte' is not the tokenizer of this run, which is {name!r}; "
        "both must be the same"
    )
    with pytest.raises(ValueError, match="which is 'byte'; both must be the same"):
        require_same_tokenizer(name, byte)
