"""What the ranks of a ring send each other in the fused schedule."""

from typing import Protocol

import torch
import torch.distributed as dist

from components.vocabulary.collectives import gather, start_gather, start_sum
from components.vocabulary.rounds import Rounds
from components.vocabulary.tokens import Tokens
from kernels.precision import accumulation_dtype
from kernels.products import multiply
from kernels.vocabulary_loss.state import merge


class Exchange(Protocol):
    """Rounds are asked for in order; all ranks make the same calls."""

    def tokens(self, i: int) -> torch.Tensor:
        """Hidden states of round ``i``, gathered: (rounds.gathered_rows, H)."""

    def merged(self, state: torch.Tensor) -> torch.Tensor:
        """The state of all columns of the vocabulary, from that of this rank's columns."""

    def give(self, i: int, strip: torch.Tensor, w: torch.Tensor) -> None:
        """Add this rank's part of dX, ``strip @ w``, to that of the others; each gets its rows."""

    def finish(self) -> None:
        """Wait until every row of dX has arrived."""


class Alone:
    """A ring of one rank: nothing is sent.

    Args:
        x: (n, H).
        dx: (n, H), where gradients go; None when ``give`` is not called.
    """

    def __init__(
        self, x: torch.Tensor, dx: torch.Tensor | None, tokens: Tokens, rounds: Rounds
    ) -> None:
        self._x, self._dx, self._tokens, self._rounds = x, dx, tokens, rounds

    def tokens(self, i: int) -> torch.Tensor:
        return self._tokens.take(self._x, self._rounds.some(i, 0))

    def merged(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def give(self, i: int, strip: torch.Tensor, w: torch.Tensor) -> None:
        assert self._dx is not None
        some = self._rounds.some(i, 0)
        if self._tokens.index is None:
            multiply(self._dx[some], strip, w)
            return
        rows = self._x.new_empty(len(strip), w.shape[1])
        multiply(rows, strip, w)
        self._tokens.put(self._dx, some, rows)

    def finish(self) -> None:
        pass


class Together:
    """A ring of several ranks.

    The next round's tokens are gathered while this round is worked on, and the sum of a round's dX
    travels during the following products; no more than two rounds of the former and one of the
    latter are held. Sums are in full precision and rounded once.

    Args:
        x: (n, H).
        dx: (n, H), where gradients go; None when ``give`` is not called.
    """

    def __init__(
        self,
        x: torch.Tensor,
        dx: torch.Tensor | None,
        tokens: Tokens,
        rounds: Rounds,
        group: dist.ProcessGroup,
    ) -> None:
        self._x, self._dx, self._tokens, self._rounds, self._group = x, dx, tokens, rounds, group
        gathered = rounds.gathered_rows, x.shape[1]
        self._inboxes = [x.new_empty(gathered) for _ in range(min(2, rounds.number))]
        wide = accumulation_dtype(x.dtype)
        self._parts = None if dx is None else x.new_empty(gathered, dtype=wide)
        self._arriving: dist.Work | None = self._gather(0) if rounds.number else None
        self._summing: tuple[int, torch.Tensor, dist.Work] | None = None

    def tokens(self, i: int) -> torch.Tensor:
        assert self._arriving is not None
        self._arriving.wait()
        self._arriving = self._gather(i + 1) if i + 1 < self._rounds.number else None
        return self._inboxes[i % 2]

    def _gather(self, i: int) -> dist.Work:
        some, share = self._rounds.some(i, self._tokens.rank), self._rounds.share
        mine = self._tokens.take(self._x, some)
        if len(mine) < share:
            # Nobody reads the rows beyond, so they may hold anything.
            padded = mine.new_empty(share, mine.shape[1])
            padded[: len(mine)] = mine
            mine = padded
        inbox = self._inboxes[i % 2].unflatten(0, (-1, share))
        return start_gather(inbox, mine.contiguous(), self._group)

    def merged(self, state: torch.Tensor) -> torch.Tensor:
        # Gathered rather than reduced: one message instead of two (largest first, then the sums),
        # and every rank adds up in the same order, so that all have the same bits.
        return merge(gather(state, self._group))

    def give(self, i: int, strip: torch.Tensor, w: torch.Tensor) -> None:
        assert self._parts is not None
        self._land()
        for gathered, rows in self._rounds.runs(i):
            multiply(self._parts[gathered], strip[rows], w)
        total = self._parts.new_empty(self._rounds.share, w.shape[1])
        self._summing = i, total, start_sum(total, self._parts, self._group)

    def _land(self) -> None:
        if self._summing is None:
            return
        assert self._dx is not None
        i, total, work = self._summing
        work.wait()
        self._summing = None
        some = self._rounds.some(i, self._tokens.rank)
        self._tokens.put(self._dx, some, total[: some.stop - some.start])

    def finish(self) -> None:
        self._land()
