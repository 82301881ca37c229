"""The loader: ranks, batches, positions in checkpoints, finite epochs."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data.corpus import StdlibCorpus
from data.loader import PackedLoader
from data.packing import IGNORED
from data.tokenizer import build_tokenizer
from tests.unit.test_data_store import Given, given
from tests.unit.test_data_tokenizer import write_tokenizer

BYTE = build_tokenizer("byte")
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def make(
    corpus: Given,
    *,
    ranks: int = 1,
    rank: int = 0,
    batch: int = 1,
    seq_len: int = 16,
    **config: Any,
) -> PackedLoader:
    return PackedLoader.Config(corpus=corpus, **config).build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=BYTE,
        seq_len=seq_len,
        local_batch_size=batch,
        snapshot_every_n_steps=None,
    )


def rows(batches: Iterable[Batch]) -> list[list[list[int]]]:
    """Each sample as [input, labels, positions], in the order of the batches."""
    return [
        [inputs["input"][row].tolist(), labels[row].tolist(), inputs["positions"][row].tolist()]
        for inputs, labels in batches
        for row in range(len(labels))
    ]


def take(loader: PackedLoader, steps: int) -> list[list[list[int]]]:
    return rows(list(islice(iter(loader), steps)))


def together(loaders: list[PackedLoader], steps: int) -> list[list[list[int]]]:
    """What several ranks take, in the order of the samples."""
    iterators: list[Iterator[Batch]] = [iter(loader) for loader in loaders]
    return [row for _ in range(steps) for each in iterators for row in rows([next(each)])]


def epoch_steps(loader: PackedLoader) -> int:
    return loader.stream.epoch_tokens // loader.stream.seq_len


def test_batches_are_what_the_trainer_takes(tmp_path: Path) -> None:
    inputs, labels = next(iter(make(given(tmp_path), batch=3)))
    assert set(inputs) == {"input", "positions"}
    for tensor in (*inputs.values(), labels):
        assert tensor.shape == (3, 16)
        assert tensor.dtype == torch.int64
    positions, following = inputs["positions"], labels != IGNORED
    assert (positions[:, 0] == 0).all()
    assert torch.equal(inputs["input"][:, 1:][following[:, :-1]], labels[:, :-1][following[:, :-1]])
    assert torch.equal(~following, inputs["input"] == BYTE.eos_id)
    assert torch.equal(inputs["input"] == 256, (positions == 0) & (inputs["input"] == 256))


def test_two_ranks_take_what_one_rank_takes_in_batches_of_two(tmp_path: Path) -> None:
    corpus = given(tmp_path)
    one = make(corpus, batch=2)
    steps = 2 * epoch_steps(one)
    two = [make(corpus, ranks=2, rank=rank) for rank in range(2)]
    assert together(two, steps) == take(one, steps)


def test_batches_follow_the_shuffled_order_and_leave_out_nothing(tmp_path: Path) -> None:
    loader = make(given(tmp_path, shuffle_window=8), batch=8)
    (first, second) = rows(islice(iter(loader), 1)), rows(islice(iter(loader), 1))
    packed = [[array.tolist() for array in loader.stream.sample(k)] for k in range(16)]
    packed = [[tokens, labels, positions] for tokens, labels, positions in packed]
    assert sorted(first) == sorted(packed[:8])
    assert sorted(second) == sorted(packed[8:])
    assert first != packed[:8]


@pytest.mark.parametrize("position", ["start", "middle", "epoch edge"])
def test_a_state_saved_twice_continues_exactly(tmp_path: Path, position: str) -> None:
    corpus = given(tmp_path)
    uninterrupted = make(corpus, batch=2)
    edge = epoch_steps(uninterrupted) // 2 - 1
    before = {"start": 0, "middle": 5, "epoch edge": edge}[position]
    expected = take(uninterrupted, before + 6)

    first = make(corpus, batch=2)
    seen = take(first, before)
    for _ in range(2):
        resumed = make(corpus, batch=2)
        resumed.load_state_dict(first.state_dict())
        assert resumed.state_dict() == first.state_dict()
        seen += take(resumed, 3)
        first = resumed
    assert seen == expected


def test_iterating_again_continues(tmp_path: Path) -> None:
    corpus = given(tmp_path)
    loader = make(corpus)
    assert take(loader, 4) + take(loader, 4) == take(make(corpus), 8)


def test_loading_moves_an_iterator_that_already_runs(tmp_path: Path) -> None:
    corpus = given(tmp_path)
    loader = make(corpus)
    start = loader.state_dict()
    iterator = iter(loader)
    expected = rows([next(iterator), next(iterator)])
    loader.load_state_dict(start)
    assert rows([next(iterator), next(iterator)]) == expected


def test_the_state_is_plain_and_equal_on_every_rank(tmp_path: Path) -> None:
    corpus = given(tmp_path)
    states = []
    for rank in range(3):
        loader = make(corpus, ranks=3, rank=rank, batch=2)
        take(loader, 4)
        states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    assert states[0]["sample"] == 24
    assert {type(value) for value in states[0].values()} <= {int, float, str}


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (4, 1), (2, 3), (3, 2)])
def test_any_number_of_ranks_continues_at_the_same_sample(
    tmp_path: Path, ranks: int, batch: int
) -> None:
    corpus = given(tmp_path)
    saved = make(corpus, ranks=2, rank=1, batch=2)
    take(saved, 3)
    resumed = [make(corpus, ranks=ranks, rank=rank, batch=batch) for rank in range(ranks)]
    for loader in resumed:
        loader.load_state_dict(saved.state_dict())
    steps = 24 // (ranks * batch)
    expected = take(make(corpus), 12 + steps * ranks * batch)[12:]
    assert together(resumed, steps) == expected


def test_a_position_in_other_data_is_refused_with_every_difference(tmp_path: Path) -> None:
    corpus = given(tmp_path)
    saved = make(corpus).state_dict()
    changed = replace(corpus, texts={**corpus.texts, "new": b"new"}, seed=1, held_out=0.5)
    other = make(replace(changed, shuffle_window=2), seq_len=8, split="validation")
    with pytest.raises(ValueError) as refusal:
        other.load_state_dict({**saved, "tokenizer": "tokenizer-1"})
    assert str(refusal.value) == (
        "the checkpoint's data position belongs to other data:\n"
        "  split: saved 'train', present 'validation'\n"
        "  data.tokenizer: saved 'tokenizer-1', present 'byte'\n"
        "  data.seed: saved 0, present 1\n"
        "  data.held_out: saved 0.05, present 0.5\n"
        "  data.shuffle_window: saved 1024, present 2\n"
        "  training.seq_len: saved 16, present 8\n"
        f"  data (documents of the corpus): saved {saved['fingerprint']!r}, "
        f"present {other.store.digest!r}\n"
        "restore these settings, or start the data from its beginning with "
        "checkpoint.exclude_from_loading=[dataloader]"
    )
    assert other.sample == 0


def test_a_state_without_a_position_is_refused(tmp_path: Path) -> None:
    loader = make(given(tmp_path))
    with pytest.raises(ValueError) as refusal:
        loader.load_state_dict({"world_size": 1, "seed": 0, "split": "train"})
    assert str(refusal.value) == (
        "the checkpoint's data position lacks sample, tokenizer, held_out, shuffle_window, "
        "seq_len, fingerprint"
    )


def test_the_same_documents_elsewhere_are_the_same_data(tmp_path: Path) -> None:
    first = make(given(tmp_path / "a"))
    take(first, 7)
    moved = make(given(tmp_path / "b"))
    moved.load_state_dict(first.state_dict())
    assert take(moved, 3) == take(first, 3)


@pytest.mark.parametrize(
    ("ranks", "batch", "multiple"), [(1, 1, 1), (2, 1, 1), (3, 5, 1), (2, 2, 7)]
)
def test_a_finite_epoch_is_equally_long_on_every_rank(
    tmp_path: Path, ranks: int, batch: int, multiple: int
) -> None:
    corpus = given(tmp_path, held_out=0.3)
    config: dict[str, Any] = {
        "split": "validation",
        "infinite": False,
        "batches_multiple": multiple,
    }
    loaders = [make(corpus, ranks=ranks, rank=rank, batch=batch, **config) for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    lengths = {len(each) for each in batches}
    assert len(lengths) == 1
    assert lengths.pop() % multiple == 0
    documents = loaders[0].stream.documents
    valid = sum(int((labels != IGNORED).sum()) for each in batches for _, labels in each)
    assert valid == documents.token_count - len(documents.chosen)
    samples = [row for step in zip(*batches, strict=True) for row in rows(list(step))]
    expected = [loaders[0].stream.finite_sample(k) for k in range(len(samples))]
    assert samples == [[a.tolist() for a in sample] for sample in expected]
    assert all(next(iter(loader), None) is None for loader in loaders)


def test_the_validator_builds_both_kinds_from_one_config(tmp_path: Path) -> None:
    config = PackedLoader.Config(corpus=given(tmp_path), split="validation", infinite=False)
    arguments = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": BYTE, "seq_len": 8}
    finite = replace(config, infinite=False).build(**arguments, local_batch_size=1)
    endless = replace(config, infinite=True).build(**arguments, local_batch_size=1)
    assert len(list(finite)) == finite.end
    assert len(list(islice(endless, 3 * finite.end))) == 3 * finite.end


def test_training_and_validation_share_no_document(tmp_path: Path) -> None:
    corpus = Given(
        texts={str(i): bytes([i]) * 5 for i in range(100)}, held_out=0.3, cache_dir=str(tmp_path)
    )
    train, validation = (
        {token for tokens, _, _ in take(make(corpus, split=split), 300) for token in tokens}
        for split in ("train", "validation")
    )
    assert train & validation == {256, 257}
    assert len(train | validation) == 102


def test_bad_settings_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    corpus = given(tmp_path, held_out=2.0, tokenizer=write_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(ValueError, match="^data.held_out: 2.0 is not a fraction"):
        make(corpus)
    with pytest.raises(ValueError, match="^data.tokenizer: .* is not the tokenizer of this run"):
        make(replace(corpus, held_out=0.1))
    assert corpus.reads == []


def test_the_default_is_the_standard_library() -> None:
    config = PackedLoader.Config()
    assert config.corpus == StdlibCorpus()
    assert (config.split, config.infinite) == ("train", True)
