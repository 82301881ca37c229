"""Packed documents cut into chunks of tokens, and runs of chunks that are computed together."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive chunks of the tokens ``start`` to ``stop`` - 1.

    Attributes:
        chunk: tokens of a chunk; a document's last chunk is padded to it.
        fresh: per chunk, whether it starts from a state of zeros.
        slots: int64 (stop - start,), the row of each token among the padded chunks; None where no
            chunk is padded.
    """

    start: int
    stop: int
    chunk: int
    fresh: tuple[bool, ...]
    slots: torch.Tensor | None

    def pack(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(T, H, d) -> (chunks, H, chunk, d) of ``dtype``, contiguous, zeros in the padding."""
        rows = x[self.start : self.stop]
        if self.slots is not None:
            padded = x.new_zeros(len(self.fresh) * self.chunk, *x.shape[1:])
            rows = padded.index_copy_(0, self.slots, rows)
        chunks = rows.unflatten(0, (-1, self.chunk)).transpose(1, 2)
        return chunks.to(dtype, memory_format=torch.contiguous_format)

    def used(self, dtype: torch.dtype) -> torch.Tensor | None:
        """(chunks, 1, chunk, 1): one for a token, zero for padding; None where there is none."""
        if self.slots is None:
            return None
        flat = self.slots.new_zeros(len(self.fresh) * self.chunk, dtype=dtype)
        return flat.index_fill_(0, self.slots, 1).view(-1, 1, self.chunk, 1)

    def unpack(self, chunks: torch.Tensor, into: torch.Tensor) -> None:
        """Write (chunks, H, chunk, d) to this segment's rows of ``into`` (T, H, d)."""
        rows = chunks.transpose(1, 2).flatten(0, 1)
        into[self.start : self.stop] = rows if self.slots is None else rows[self.slots]


def segments(
    lengths: tuple[int, ...],
    chunk: int,
    size: int,
    device: torch.device,
    continued: bool = False,
) -> Iterator[Segment]:
    """The chunks of documents of these lengths, in token order, ``size`` at a time.

    A document's chunks are counted from its own first token, so how it is cut does not depend on
    what it is packed with.

    Args:
        continued: whether the first document is the rest of one that began before these tokens.
    """
    chunks = [
        (offset == 0 and not (continued and number == 0), min(chunk, length - offset))
        for number, length in enumerate(lengths)
        for offset in range(0, length, chunk)
    ]
    start = 0
    for first in range(0, len(chunks), size):
        fresh, filled = zip(*chunks[first : first + size], strict=True)
        stop = start + sum(filled)
        slots = None
        if stop - start < len(filled) * chunk:
            used = torch.arange(chunk) < torch.tensor(filled).unsqueeze(1)
            slots = used.flatten().nonzero().squeeze(1).to(device)
        yield Segment(start, stop, chunk, fresh, slots)
        start = stop
