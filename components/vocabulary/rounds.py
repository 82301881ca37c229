"""Which tokens of which rank meet in which strip of the fused schedule."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    """Every round takes up to ``share`` tokens from each rank, whatever is left of them.

    Gathered tokens lie at ``rank * share`` of a buffer of ``ranks * share`` rows. A strip has rows
    for the tokens that are there only, rank after rank: a rank that ran out costs nothing.

    Attributes:
        counts: tokens of each rank.
        share: the most that one rank brings into a round.
        number: how many rounds there are; 0 if no rank has a token.
    """

    counts: tuple[int, ...]
    share: int
    number: int

    @classmethod
    def plan(cls, counts: Sequence[int], rows: int) -> "Rounds":
        """As few rounds as strips of ``rows`` rows allow, all about equally long."""
        most, limit = max(counts), rows // len(counts)
        number = -(-most // limit)
        return cls(tuple(counts), -(-most // number) if number else 0, number)

    @property
    def gathered_rows(self) -> int:
        """Rows of the buffer that one round's tokens are gathered into."""
        return len(self.counts) * self.share

    @property
    def strip_rows(self) -> int:
        """Rows of the longest strip, which is the first."""
        return sum(min(count, self.share) for count in self.counts)

    def some(self, i: int, rank: int) -> slice:
        """Tokens that ``rank`` brings into round ``i``, numbered as it counts them."""
        count = self.counts[rank]
        return slice(min(i * self.share, count), min((i + 1) * self.share, count))

    def strip(self, i: int) -> list[slice]:
        """Rows of round ``i``'s strip that belong to each rank."""
        rows, begin = [], 0
        for rank in range(len(self.counts)):
            some = self.some(i, rank)
            rows.append(slice(begin, begin + some.stop - some.start))
            begin = rows[-1].stop
        return rows

    def runs(self, i: int) -> list[tuple[slice, slice]]:
        """Gathered rows without gaps between them, and their rows of the strip; as few as can be.

        Matrix products are taken run by run.
        """
        runs: list[tuple[slice, slice]] = []
        for rank, rows in enumerate(self.strip(i)):
            begin = rank * self.share
            if runs and runs[-1][0].stop == begin:
                begin, rows = runs[-1][0].start, slice(runs[-1][1].start, rows.stop)
                runs.pop()
            if rows.stop > rows.start:
                runs.append((slice(begin, begin + rows.stop - rows.start), rows))
        return runs
