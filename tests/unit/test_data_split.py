"""The held-out split: by name, stable, never empty."""

import numpy as np
import pytest

from data.split import held_out_mask, name_hash


def hashes_of(names: list[str]) -> np.ndarray:
    return np.array([name_hash(name) for name in names], dtype=np.uint64)


def test_the_hash_of_a_name_never_changes() -> None:
    assert name_hash("asyncio/events.py") == 0xB875AF98336BED09


def test_the_fraction_is_met_in_the_mean() -> None:
    hashes = hashes_of([f"document {i}" for i in range(20_000)])
    for fraction in (0.01, 0.05, 0.5, 0.95):
        assert held_out_mask(hashes, fraction).mean() == pytest.approx(fraction, abs=0.01)


def test_documents_keep_their_side_when_the_corpus_grows() -> None:
    names = [f"document {i}" for i in range(500)]
    before = held_out_mask(hashes_of(names), 0.1)
    grown = sorted([*names, *(f"another {i}" for i in range(500))])
    after = dict(zip(grown, held_out_mask(hashes_of(grown), 0.1), strict=True))
    assert [after[name] for name in names] == before.tolist()


@pytest.mark.parametrize("count", [2, 3, 10])
def test_neither_split_is_empty(count: int) -> None:
    hashes = hashes_of([f"document {i}" for i in range(count)])
    smallest = held_out_mask(hashes, 1e-9)
    assert smallest.sum() == 1
    assert smallest[np.argmin(hashes)]
    largest = held_out_mask(hashes, 1 - 1e-9)
    assert largest.sum() == count - 1
    assert not largest[np.argmax(hashes)]


def test_nothing_is_held_out_when_asked_for_nothing() -> None:
    assert not held_out_mask(hashes_of(["only"]), 0).any()
    assert held_out_mask(np.zeros(3, dtype=np.uint64), 0).tolist() == [False] * 3


def test_one_document_cannot_be_divided() -> None:
    with pytest.raises(ValueError) as refusal:
        held_out_mask(hashes_of(["only"]), 0.05)
    assert str(refusal.value) == (
        "data.held_out: 0.05 cannot divide a corpus of 1 document into two splits; "
        "add documents, or write 0 and turn validation off"
    )
