"""Where a batch of packed documents is cut, whatever documents it holds."""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Piece:
    """The tokens ``begin`` to ``stop`` - 1 of a batch.

    Attributes:
        lengths: tokens of each document in the piece.
        ahead: tokens of the first document before the piece.
        carries: whether the last document goes on after the piece.
    """

    begin: int
    stop: int
    lengths: tuple[int, ...]
    ahead: int = 0
    carries: bool = False

    def __len__(self) -> int:
        return self.stop - self.begin

    @property
    def continued(self) -> bool:
        """Whether the first document began before the piece."""
        return self.ahead > 0

    @property
    def rows(self) -> slice:
        """The piece's rows of the batch."""
        return slice(self.begin, self.stop)


@lru_cache(maxsize=4)
def cut(lengths: tuple[int, ...], size: int) -> tuple[Piece, ...]:
    """Cut documents of these lengths, one after the other, every ``size`` tokens.

    Tokens are counted through the batch, so later tokens move no cut before them.
    """
    pieces: list[Piece] = []
    inside: list[int] = []
    begin, held, ahead = 0, 0, 0
    for length in lengths:
        left = length
        while held + left >= size:
            inside.append(size - held)
            left -= size - held
            pieces.append(Piece(begin, begin + size, tuple(inside), ahead, left > 0))
            begin, held, inside = begin + size, 0, []
            ahead = length - left if left else 0
        if left:
            inside.append(left)
            held += left
    if inside:
        pieces.append(Piece(begin, begin + held, tuple(inside), ahead))
    return tuple(pieces)
