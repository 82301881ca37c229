"""The packed stream against a slow twin that walks token by token."""

import random

import numpy as np
import pytest

from data.packing import IGNORED, PackedStream, Sample, shuffled
from data.store import TokenDocuments

PAD = 999


def make_documents(texts: list[list[int]], chosen: list[int] | None = None) -> TokenDocuments:
    offsets = np.cumsum([0, *(len(text) for text in texts)])
    picked = range(len(texts)) if chosen is None else chosen
    tokens = np.array([token for text in texts for token in text], dtype=np.uint16)
    return TokenDocuments(tokens, offsets, np.array(picked, dtype=np.int64))


def ragged(seed: int, count: int, longest: int) -> list[list[int]]:
    """Documents of 1..longest tokens; every token of the corpus is another number."""
    draw = random.Random(seed)
    lengths = [1 if draw.random() < 0.3 else draw.randint(1, longest) for _ in range(count)]
    numbers = iter(range(sum(lengths)))
    return [[next(numbers) for _ in range(length)] for length in lengths]


def twin_mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def twin_shuffled(count: int, seed: int, epoch: int) -> list[int]:
    start = twin_mix((twin_mix(seed % 2**64) + epoch) % 2**64)
    return sorted(range(count), key=lambda i: twin_mix((start + i) % 2**64))


def twin_samples(
    texts: list[list[int]], chosen: list[int], seq_len: int, seed: int, count: int
) -> list[tuple[list[int], list[int], list[int]]]:
    """Build the first ``count`` samples from a list of single tokens."""
    stream: list[tuple[int, tuple[int, int]]] = []
    epoch = 0
    while len(stream) <= count * seq_len:
        for place in twin_shuffled(len(chosen), seed, epoch):
            document = chosen[place]
            stream += [(token, (epoch, document)) for token in texts[document]]
        epoch += 1
    samples = []
    for start in range(0, count * seq_len, seq_len):
        tokens: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for at in range(start, start + seq_len):
            (token, owner), (following, next_owner) = stream[at], stream[at + 1]
            continues = at > start and stream[at - 1][1] == owner
            tokens.append(token)
            labels.append(following if next_owner == owner else IGNORED)
            positions.append(positions[-1] + 1 if continues else 0)
        samples.append((tokens, labels, positions))
    return samples


def as_lists(sample: Sample) -> tuple[list[int], list[int], list[int]]:
    for array in sample:
        assert array.dtype == np.int64
    return sample.input.tolist(), sample.labels.tolist(), sample.positions.tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("seq_len", [1, 2, 7, 32])
def test_samples_equal_the_twin_over_several_epochs(seed: int, seq_len: int) -> None:
    texts = ragged(seed, count=9, longest=20)
    chosen = [i for i in range(9) if i != seed]
    stream = PackedStream(make_documents(texts, chosen), seq_len, seed=seed, pad_id=PAD)
    count = 3 * stream.epoch_tokens // seq_len + 1
    expected = twin_samples(texts, chosen, seq_len, seed, count)
    assert [as_lists(stream.sample(k)) for k in range(count)] == expected


@pytest.mark.parametrize("texts", [[[1, 2, 3], [4], [5, 6]], [[1, 2, 3, 4, 5]], [[1]]])
def test_a_sample_longer_than_the_corpus_repeats_it(texts: list[list[int]]) -> None:
    stream = PackedStream(make_documents(texts), 50, seed=3, pad_id=PAD)
    expected = twin_samples(texts, list(range(len(texts))), 50, 3, 4)
    assert [as_lists(stream.sample(k)) for k in range(4)] == expected


def test_one_token_documents_predict_nothing() -> None:
    stream = PackedStream(make_documents([[1], [2], [3]]), 4, seed=0, pad_id=PAD)
    sample = stream.sample(5)
    assert sample.labels.tolist() == [IGNORED] * 4
    assert sample.positions.tolist() == [0] * 4


def test_an_epoch_that_fills_samples_exactly_ends_at_their_edge() -> None:
    texts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    stream = PackedStream(make_documents(texts), 4, seed=1, pad_id=PAD)
    expected = twin_samples(texts, [0, 1], 4, 1, 6)
    assert [as_lists(stream.sample(k)) for k in range(6)] == expected
    assert stream.sample(1).labels[-1] == IGNORED


def test_samples_do_not_depend_on_what_was_read_before() -> None:
    documents = make_documents(ragged(5, count=30, longest=12))
    far = 10_000
    fresh = PackedStream(documents, 8, seed=5, pad_id=PAD)
    used = PackedStream(documents, 8, seed=5, pad_id=PAD)
    for k in (0, far + 50, 3, far - 1):
        used.sample(k)
    assert as_lists(used.sample(far)) == as_lists(fresh.sample(far))


def test_the_orders_of_past_epochs_are_forgotten() -> None:
    stream = PackedStream(make_documents([[1, 2], [3]]), 8, seed=0, pad_id=PAD)
    for k in range(20):
        stream.sample(k)
    assert len(stream._orders) == 2


def test_every_epoch_holds_every_token_once_and_in_another_order() -> None:
    texts = ragged(7, count=40, longest=9)
    total = sum(map(len, texts))
    stream = PackedStream(make_documents(texts), total, seed=7, pad_id=PAD)
    epochs = [stream.sample(k).input.tolist() for k in range(3)]
    assert all(sorted(epoch) == list(range(total)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    other = PackedStream(make_documents(texts), total, seed=8, pad_id=PAD)
    assert other.sample(0).input.tolist() != epochs[0]


@pytest.mark.parametrize("seq_len", [1, 5, 8, 100])
def test_a_finite_epoch_is_the_stream_and_then_padding(seq_len: int) -> None:
    texts = ragged(2, count=6, longest=10)
    total = sum(map(len, texts))
    stream = PackedStream(make_documents(texts), seq_len, seed=2, pad_id=PAD)
    count = stream.finite_samples
    assert (count - 1) * seq_len < total <= count * seq_len
    samples = [stream.finite_sample(k) for k in range(count + 2)]
    tokens = np.concatenate([sample.input for sample in samples])
    labels = np.concatenate([sample.labels for sample in samples])
    assert sorted(tokens[:total].tolist()) == list(range(total))
    assert (tokens[total:] == PAD).all()
    assert (labels[total:] == IGNORED).all()
    assert (labels != IGNORED).sum() == total - len(texts)
    for k in range(total // seq_len):
        assert as_lists(samples[k]) == as_lists(stream.sample(k))
    end = total - (count - 1) * seq_len
    assert samples[count - 1].positions[end:].tolist() == list(range(seq_len - end))
    assert samples[count].positions.tolist() == list(range(seq_len))


def test_pieces_name_documents_and_where_they_are_cut() -> None:
    texts = [[10, 11, 12, 13, 14], [20, 21], [30]]
    documents = make_documents(texts)
    stream = PackedStream(documents, 4, seed=0, pad_id=PAD)
    for k in range(9):
        rebuilt = [
            token
            for document, begin, length in zip(*stream.pieces(k * 4, 4), strict=True)
            for token in texts[document][begin : begin + length]
        ]
        assert rebuilt == stream.sample(k).input.tolist()


def test_shuffled_samples_are_the_same_samples_in_runs() -> None:
    documents = make_documents(ragged(4, count=50, longest=30))
    stream = PackedStream(documents, 4, seed=4, pad_id=PAD, window=16)
    indices = [stream.shuffled_index(k) for k in range(48)]
    for run in range(3):
        part = indices[run * 16 : run * 16 + 16]
        assert sorted(part) == list(range(run * 16, run * 16 + 16))
        assert part != sorted(part)
    assert [i - 16 for i in indices[16:32]] != indices[:16]
    assert as_lists(stream.shuffled_sample(5)) == as_lists(stream.sample(indices[5]))


def test_no_window_is_larger_than_an_epoch() -> None:
    documents = make_documents([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]])
    assert PackedStream(documents, 3, seed=0, pad_id=PAD, window=1000).window == 3
    assert PackedStream(documents, 30, seed=0, pad_id=PAD, window=1000).window == 1
    packed = PackedStream(documents, 3, seed=0, pad_id=PAD, window=1)
    assert [packed.shuffled_index(k) for k in range(9)] == list(range(9))


def test_the_order_never_changes() -> None:
    assert shuffled(8, seed=0, epoch=0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 + 5])
def test_the_order_equals_the_twin(seed: int) -> None:
    for epoch in (0, 1, 77):
        assert shuffled(100, seed, epoch).tolist() == twin_shuffled(100, seed, epoch)


def test_a_sample_needs_a_token() -> None:
    with pytest.raises(ValueError) as refusal:
        PackedStream(make_documents([[1]]), 0, seed=0, pad_id=PAD)
    assert str(refusal.value) == "training.seq_len: 0 is not a number of tokens above 0"
