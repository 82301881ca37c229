"""An endless stream of shuffled documents, cut into samples that can be found by number."""

from typing import NamedTuple

import numpy as np

from data.store import TokenDocuments

IGNORED = -100
"""Label of a position that has no next token to predict; excluded from loss and token counts."""

_KEPT_ORDERS = 2
_MIX_STEP = 0x9E3779B97F4A7C15
_MIX_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_MIX_SECOND = np.uint64(0x94D049BB133111EB)


class Sample(NamedTuple):
    """One packed sequence; every array is int64 of shape (seq_len,).

    Attributes:
        input: token ids.
        labels: the next token of the same document, or ``IGNORED``.
        positions: distance from the start of the document, or from the start of the sample for a
            document that began in an earlier one.
    """

    input: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


class Pieces(NamedTuple):
    """Consecutive pieces of documents; every array is int64 of shape (pieces,).

    Attributes:
        document: index of the document in the store.
        begin: first token of the piece, counted from the start of the document.
        length: tokens in the piece.
    """

    document: np.ndarray
    begin: np.ndarray
    length: np.ndarray


class PackedStream:
    """The documents, one after the other, in a new order every epoch, without end.

    Sample k is tokens k * seq_len up to (k + 1) * seq_len of the stream. Nothing is dropped: a
    document longer than a sample continues in the next, and so does an epoch. Being numbers, the
    samples need no iterator state. Finding one is a binary search in the order of its epoch; the
    orders of two epochs are kept, 32 bytes a document.

    ``shuffled_sample`` numbers the same samples otherwise, so that neighbours come from different
    documents: each run of ``window`` samples is shuffled.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        seq_len: int,
        *,
        seed: int,
        pad_id: int,
        window: int = 1,
    ) -> None:
        """Prepare the stream.

        Args:
            documents: what to pack, at least one token.
            seq_len: tokens per sample.
            seed: order of the documents, and of the samples in a window.
            pad_id: token id after the end of the data in ``finite_sample``.
            window: samples shuffled among each other, >= 1; no more than one epoch holds.

        Raises:
            ValueError: ``seq_len`` is not positive.
        """
        if seq_len < 1:
            raise ValueError(f"training.seq_len: {seq_len} is not a number of tokens above 0")
        self.documents = documents
        self.seq_len = seq_len
        self.seed = seed
        self.pad_id = pad_id
        self.epoch_tokens = documents.token_count
        self.window = max(1, min(window, self.epoch_tokens // seq_len))
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def finite_samples(self) -> int:
        """Samples that hold one epoch, the last of them perhaps in part."""
        return -(-self.epoch_tokens // self.seq_len)

    def sample(self, index: int) -> Sample:
        """Return sample ``index`` >= 0 of the endless stream."""
        # One token more than the sample, because it is the label of the last position.
        pieces = self.pieces(index * self.seq_len, self.seq_len + 1)
        source = self.documents.offsets[pieces.document] + pieces.begin
        ends = np.cumsum(pieces.length)
        begins = ends - pieces.length
        steps = np.arange(self.seq_len + 1)
        tokens = self.documents.tokens[steps + np.repeat(source - begins, pieces.length)]
        tokens = tokens.astype(np.int64)
        labels = tokens[1:].copy()
        # Each piece but the last stops where its document does, and the next token is unrelated.
        labels[ends[:-1] - 1] = IGNORED
        positions = steps - np.repeat(begins, pieces.length)
        return Sample(tokens[:-1], labels, positions[:-1])

    def shuffled_sample(self, index: int) -> Sample:
        """Return sample ``shuffled_index(index)``."""
        return self.sample(self.shuffled_index(index))

    def shuffled_index(self, index: int) -> int:
        """Return which sample of the stream comes at place ``index`` >= 0 of the shuffled order."""
        block, row = divmod(index, self.window)
        return block * self.window + int(shuffled(self.window, ~self.seed, block)[row])

    def finite_sample(self, index: int) -> Sample:
        """Return sample ``index`` >= 0 of one epoch alone.

        After its last token come ``pad_id``, labels that are ignored and positions of their own.
        """
        sample = self.sample(index)
        end = max(0, min(self.seq_len, self.epoch_tokens - index * self.seq_len))
        sample.input[end:] = self.pad_id
        sample.labels[end:] = IGNORED
        sample.positions[end:] = np.arange(self.seq_len - end)
        return sample

    def pieces(self, start: int, count: int) -> Pieces:
        """Return what tokens ``start`` to ``start + count`` of the stream are made of."""
        epoch, offset = divmod(start, self.epoch_tokens)
        parts = []
        while count:
            taken = min(count, self.epoch_tokens - offset)
            parts.append(self._epoch_pieces(epoch, offset, taken))
            epoch, offset, count = epoch + 1, 0, count - taken
        return Pieces(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _epoch_pieces(self, epoch: int, start: int, count: int) -> Pieces:
        order, ends = self._order(epoch)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, start + count, side="left"))
        document = order[first : last + 1]
        length = self.documents.offsets[document + 1] - self.documents.offsets[document]
        begin = np.zeros_like(length)
        begin[0] = start - (ends[first] - length[0])
        length[-1] -= ends[last] - (start + count)
        return Pieces(document, begin, length - begin)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents in the order of ``epoch``, and where each ends in the epoch."""
        if epoch not in self._orders:
            while len(self._orders) >= _KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            order = shuffled(len(self.documents.chosen), self.seed, epoch)
            ends = np.cumsum(self.documents.lengths[order])
            self._orders[epoch] = (self.documents.chosen[order], ends)
        return self._orders[epoch]


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of 0..count-1, int64, shape (count,).

    Sorting by a hash of our own keeps it equal in every version of NumPy, whose generators promise
    no such thing; a checkpoint's position would otherwise point to other documents.
    """
    start = _mix(np.array([seed & (2**64 - 1)], dtype=np.uint64))
    start = _mix(start + np.uint64(epoch))
    keys = _mix(start + np.arange(count, dtype=np.uint64))
    return np.argsort(keys, kind="stable")


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values one to one (the finaliser of SplitMix64)."""
    values = values + np.uint64(_MIX_STEP)
    values = (values ^ (values >> np.uint64(30))) * _MIX_FIRST
    values = (values ^ (values >> np.uint64(27))) * _MIX_SECOND
    return values ^ (values >> np.uint64(31))
