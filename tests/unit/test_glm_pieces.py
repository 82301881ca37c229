"""Documents in a batch, FLOP counts, and other pieces of GLM-5.3-Flash that need no oracle."""

import torch

from components.models.glm_flash.documents import Documents


def test_documents_begin_at_rows_and_where_positions_jump():
    positions = torch.tensor([[5, 6, 0, 1, 2], [0, 0, 1, 7, 8]])
    documents = Documents.from_positions(positions)
    assert documents.lengths == (2, 3, 1, 2, 2)
    assert documents.position.tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 0, 1]
    assert documents.start.tolist() == [0, 0, 2, 2, 2, 5, 6, 6, 8, 8]
    assert documents.bounds.tolist() == [0, 2, 5, 6, 8, 10]


def test_documents_from_lengths_are_the_same():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    one, other = Documents.from_positions(positions), Documents.from_lengths((3, 2, 1))
    assert one.lengths == other.lengths
    assert torch.equal(one.position, other.position) and torch.equal(one.start, other.start)
