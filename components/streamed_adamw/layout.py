"""Where parameters lie in one flat space, and how that space is cut into buckets.

The flat space counts fp32 values. Master weights, first and second moments are three tensors of its
length, so that a bucket is the same interval in each and three copies move it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 4
"""Values: every parameter begins at 16 bytes, which the device's kernel reads at once."""

CUT = 64
"""Values: a parameter is cut at multiples of it, counted from its own begin. Kernels treat what is
left behind their widest vector separately; a cut elsewhere would move values there."""

VALUE = 4
"""Bytes of an fp32 value."""


def rounded(count: int, unit: int) -> int:
    """The multiple of ``unit`` that is at least ``count``."""
    return -(-count // unit) * unit


@dataclass(frozen=True)
class Piece:
    """Neighbouring values of one parameter.

    Attributes:
        parameter: its number, in the order of the flat space.
        first: values of the parameter before this piece.
        offset: where the piece begins in the flat space.
        count: its values.
    """

    parameter: int
    first: int
    offset: int
    count: int


@dataclass(frozen=True)
class Bucket:
    """An interval of the flat space that moves as one.

    Attributes:
        start: its begin.
        stop: its end; what alignment adds is included.
        pieces: whole parameters, or one part of a large one.
    """

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Values, those that alignment adds included."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Parameters in a row.

    Attributes:
        counts: values of each parameter on this rank; 0 for an empty shard.
        offsets: where each begins.
        size: of the flat space.
    """

    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int


def lay_out(counts: Sequence[int]) -> Layout:
    """Put parameters of so many values one behind the other."""
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end += rounded(count, ALIGNMENT)
    return Layout(tuple(counts), tuple(offsets), end)


def buckets(layout: Layout, limit: int, start: int = 0, stop: int | None = None) -> list[Bucket]:
    """Cut an interval into buckets: whole parameters in order, as many as fit.

    A parameter that is larger than the limit gets buckets of its own, of nearly equal size.

    Args:
        layout: of all parameters.
        limit: values that a bucket may have, at least ``CUT``.
        start: begin of the interval; ``split_point`` says where a parameter may be cut.
        stop: its end; that of the flat space by default.
    """
    found: list[Bucket] = []
    waiting: list[Piece] = []

    def close() -> None:
        if waiting:
            found.append(_bucket(waiting))
            waiting.clear()

    for piece in _inside(layout, start, layout.size if stop is None else stop):
        taken = _end(piece) - waiting[0].offset if waiting else _end(piece) - piece.offset
        if taken > limit:
            close()
        if _end(piece) - piece.offset > limit:
            found += [_bucket([part]) for part in _equal_parts(piece, limit)]
        else:
            waiting.append(piece)
    close()
    return found


def split_point(layout: Layout, wanted: int) -> int:
    """The place at or before ``wanted`` where the flat space may be cut in two."""
    for offset, count in zip(layout.offsets, layout.counts, strict=True):
        end = offset + rounded(count, ALIGNMENT)
        if wanted < end:
            return offset + max(0, wanted - offset) // CUT * CUT
    return layout.size


def _inside(layout: Layout, start: int, stop: int) -> list[Piece]:
    """What of each parameter lies in an interval; nothing of empty ones."""
    pieces = []
    for number, (offset, count) in enumerate(zip(layout.offsets, layout.counts, strict=True)):
        begin, end = max(offset, start), min(offset + count, stop)
        if begin < end:
            pieces.append(Piece(number, begin - offset, begin, end - begin))
    return pieces


def _equal_parts(piece: Piece, limit: int) -> list[Piece]:
    parts = -(-piece.count // (limit // CUT * CUT))
    size = rounded(-(-piece.count // parts), CUT)
    return [
        Piece(piece.parameter, piece.first + at, piece.offset + at, min(size, piece.count - at))
        for at in range(0, piece.count, size)
    ]


def _end(piece: Piece) -> int:
    return rounded(piece.offset + piece.count, ALIGNMENT)


def _bucket(pieces: Sequence[Piece]) -> Bucket:
    return Bucket(pieces[0].offset, _end(pieces[-1]), tuple(pieces))
