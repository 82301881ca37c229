"""What a layer's attention holds to exchange, before a run: what measured memory is held against.

All are bytes on one rank, at the most that it has at a time, beside what a layer makes of its own
tokens without others: output, log-sum-exp and gradients, in the compute dtype. For n tokens on each
of C ranks, cut into p parts per rank, in one document:

- "ulysses": keys and values in copies, the rows of all tokens for a rank's heads, and outputs as
  they are sent and as they return. In forward, when the first are there already.
- "all_gather": keys and values of all ranks as they arrived, and with a part's own, their gradients
  as computed and as packed; and float32 sums for all ranks and for the rank itself.
- "ring", "double_ring": gradients of the queries in float32, and the rows and float32 sums that are
  on their way, each from when it is needed.
- "window": as "all_gather", for the windows before the parts, and gradients as they are sent.
"""

from dataclasses import dataclass

from components.context_parallel.softmax.attend import Exchange
from components.context_parallel.softmax.heads import HeadSplit
from components.context_parallel.softmax.volume import Heads
from components.core.sizes import FLOAT32


@dataclass(frozen=True)
class Held:
    """Of a layer on each of ``ranks`` ranks.

    Attributes:
        heads: of the layer.
        tokens: n, of one rank.
        parts: p, of one rank.
        element_size: bytes of an activation.
    """

    heads: Heads
    tokens: int
    ranks: int
    parts: int
    element_size: int

    def beside(self, exchange: Exchange, window: int | None = None) -> int:
        """Bytes, in forward or backward, wherever they are more.

        Args:
            window: of the layer; with the method "window" alone.
        """
        if exchange.method == "ulysses":
            return self._ulysses()
        if exchange.method == "all_gather":
            return self._gathered()
        if exchange.method == "window":
            assert window is not None
            return self._windows(window)
        return self._rings(exchange.inner_ring or self.ranks)

    @property
    def _row(self) -> int:
        """Bytes of keys and values, of all tokens of a rank."""
        return self.tokens * self.heads.keys_values * self.element_size

    @property
    def _queries(self) -> int:
        return self.tokens * self.heads.heads * self.heads.head_dim * self.element_size

    @property
    def _outputs(self) -> int:
        return self.tokens * self.heads.heads * self.heads.value_dim * self.element_size

    def _wide(self, narrow: int) -> int:
        """The same numbers in float32."""
        return narrow * FLOAT32 // self.element_size

    def _ulysses(self) -> int:
        copies = HeadSplit(self.heads.heads, self.heads.key_heads, self.ranks).copies
        return self._queries + 2 * copies * self._row + 2 * self._outputs

    def _gathered(self) -> int:
        every, wide = self.ranks * self._row, self._wide(self._row)
        # The batch's last part leaves no rank.
        leave = every - self._row // self.parts
        packed = 2 * every + max(leave, self._queries // self.parts)
        # In the order of ranks, and what a rank gets of it.
        summed = self.ranks * wide + wide
        return leave + self._wide(leave) + max(packed, summed) + wide - self._row

    def _windows(self, window: int) -> int:
        row = self.heads.keys_values * self.element_size
        ahead = min(window - 1, self.tokens * (self.ranks - 1))
        piece, before = ahead * row, self.parts * ahead * row
        of_part = piece + self._row // self.parts
        forward = self._row + before + of_part + self._outputs // self.parts
        own = before + self._wide(self._row) - self._row
        # Of the last part; those of the others wait.
        computed = 2 * of_part + before - piece + max(piece, self._queries // self.parts)
        # As packed; wider, first one by one, then what others send beside.
        sent = before + 2 * self._wide(before)
        return max(forward, own + computed, own + sent)

    def _rings(self, inner: int) -> int:
        outer, wide = self.ranks // inner, self._wide(self._row)
        rows, sums = _spares(inner) + _spares(outer), _sums(inner, 1)
        if outer > 1:
            # What comes home of a rank's own inner ring waits for the outer one's.
            sums = _sums(inner, 0) + _sums(outer, 1) + (inner > 1)
        # Beside its own sums. A block's gradients are made before the rank's are rounded.
        working = rows * self._row + (1 + sums) * wide
        working -= (self._queries + self._row) * (self.parts - 1) // self.parts
        # One sum leaves as the last one comes.
        home = 3 * wide - self._queries if outer == 1 else 0
        return self._wide(self._queries) + max(working, home, wide)


def _spares(ranks: int) -> int:
    """Rows of others that a ring holds: see ``travelling``."""
    return min(ranks - 1, 2)


def _sums(ranks: int, first: int) -> int:
    """Sums that a ring holds while ranks work: see ``RidingSum``."""
    return (0, 1, 3)[min(ranks - first, 2)]
