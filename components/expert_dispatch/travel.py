"""A chunk's rows under way between ranks, while the device computes something else.

Collectives run on the group's own stream, in the order in which they were asked for: each begins
once everything that the computing stream was asked for before it is done, and ``wait`` makes the
computing stream, not the host, wait for its end. All memory is the computing stream's, and is held
here until then; so no other stream is needed, and memory is free again when it is let go of.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from components.expert_dispatch.rows import ChunkRows
from kernels.expert_rows.op import gather, scatter


class Messages:
    """Messages under way, and the memory that they use."""

    def __init__(self, *, beside: bool) -> None:
        """
        Args:
            beside: False: each message is waited for where it is sent.
        """
        self._beside = beside
        self._works: list[dist.Work] = []
        self._held: list[torch.Tensor] = []

    def add(self, works: Sequence[dist.Work | None], *used: torch.Tensor) -> None:
        """Messages that were sent, and memory that must not be let go of before they arrive."""
        self._works += [work for work in works if work is not None]
        self._held += used
        if not self._beside:
            self.wait()

    def all_to_all(
        self, arriving: torch.Tensor, leaving: torch.Tensor, into: list[int], out: list[int],
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        """See ``torch.distributed.all_to_all_single``."""
        work = dist.all_to_all_single(arriving, leaving, into, out, group=group, async_op=True)
        self.add([work], arriving, leaving)

    def wait(self) -> None:
        """What is computed from now on finds everything arrived. May be called again."""
        for work in self._works:
            work.wait()
        self._works, self._held = [], []


def let_go(memory: torch.Tensor) -> None:
    """Called when nobody will read some memory any more; tests spoil it here."""


class Outward:
    """A chunk's tokens on their way to the ranks that compute their rows."""

    def __init__(
        self,
        moves: ChunkRows,
        tensors: Sequence[torch.Tensor],
        weights: torch.Tensor | None,
        *,
        beside: bool,
    ) -> None:
        """Send them.

        Args:
            tensors: each of the tokens of this rank in this chunk, (T, D).
            weights: of their routes, (T, k), to travel with them.
        """
        self._moves = moves
        self._messages = Messages(beside=beside)
        self._outboxes: list[torch.Tensor] = []
        self._inboxes = self._send_tokens(tensors) if moves.whole else self._send_rows(tensors)
        self._source = self._find_sources()
        self._weights = None if weights is None else self._send_routes(
            weights.flatten()[moves.order]
        )  # fmt: skip

    def _send_tokens(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All tokens of all ranks, by rank."""
        moves, operations = self._moves, []
        inboxes = [tensor.new_empty(sum(moves.tokens), tensor.shape[1]) for tensor in tensors]
        for tensor, inbox in zip(tensors, inboxes, strict=True):
            by_rank = inbox.split(moves.tokens)
            mine = by_rank[moves.rank].copy_(tensor)
            for peer, theirs in enumerate(by_rank):
                if peer == moves.rank:
                    continue
                if len(mine):
                    operations.append(_message(dist.isend, mine, peer, moves))
                if len(theirs):
                    operations.append(_message(dist.irecv, theirs, peer, moves))
        if operations:
            self._messages.add(dist.batch_isend_irecv(operations), *inboxes)
        return inboxes

    def _send_rows(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows that others sent, as they arrive, then all tokens of this rank."""
        moves, inboxes = self._moves, []
        for tensor in tensors:
            width = tensor.shape[1]
            inbox = tensor.new_empty(moves.leaving + len(tensor), width)
            inbox[moves.leaving :] = tensor
            outbox = tensor.new_empty(moves.returning, width)
            gather(tensor, moves.token[moves.own :], outbox)
            arriving = inbox[: moves.leaving]
            self._messages.all_to_all(arriving, outbox, moves.received, moves.sent, moves.group)
            inboxes.append(inbox)
            self._outboxes.append(outbox)
        return inboxes

    def _find_sources(self) -> torch.Tensor:
        """Where in the inboxes each arriving row is: (R,). Not to be read before ``arrive``."""
        moves = self._moves
        if moves.whole:
            return self._send_routes(moves.token + sum(moves.tokens[: moves.rank]))
        as_sent = torch.arange(moves.leaving, device=moves.token.device)
        return torch.cat([as_sent, moves.token[: moves.own] + moves.leaving])

    def _send_routes(self, values: torch.Tensor) -> torch.Tensor:
        """One number of every route, (T k,) in home order -> (R,) in the order of arrival."""
        moves = self._moves
        inbox = values.new_empty(moves.computed)
        inbox[moves.leaving :] = values[: moves.own]
        arriving, leaving = inbox[: moves.leaving], values[moves.own :]
        self._messages.all_to_all(arriving, leaving, moves.received, moves.sent, moves.group)
        return inbox

    def arrive(self) -> None:
        """Wait, and find every row's place."""
        self._messages.wait()
        for outbox in self._outboxes:
            let_go(outbox)
        self._outboxes = []
        self._source = self._source[self._moves.arrival]
        if self._weights is not None:
            self._weights = self._weights[self._moves.arrival]

    def take(self, tensor: int, rows: slice) -> torch.Tensor:
        """Rows of one of the tensors as they are computed, in new memory: (n, D)."""
        inbox, source = self._inboxes[tensor], self._source[rows]
        return gather(inbox, source, inbox.new_empty(len(source), inbox.shape[1]))

    def weights(self, rows: slice) -> torch.Tensor:
        """Of the routes of these rows, (n,)."""
        assert self._weights is not None
        return self._weights[rows]

    def close(self) -> None:
        """Nothing is taken any more."""
        for inbox in self._inboxes:
            let_go(inbox)
        self._inboxes = []


class Homeward:
    """A chunk's computed rows on their way home: (R, D) -> (T k, D) in home order.

    One piece of memory: rows of others, to be sent; this rank's own; rows that others send.
    """

    def __init__(self, moves: ChunkRows, parts: list[torch.Tensor], *, beside: bool) -> None:
        """Send them.

        Args:
            parts: of the rows as they are computed, one after the other; emptied. Rows (n, D) or
                one number each (n,).
        """
        self._moves = moves
        self._messages = Messages(beside=beside)
        like = parts[0]
        size = moves.computed + moves.returning
        self._memory = like.new_empty(size, *like.shape[1:])
        begin = 0
        while parts:
            part = parts.pop(0)
            where = moves.arrival[begin : begin + len(part)]
            if part.dim() == 1:
                self._memory[where] = part
            else:
                scatter(part, where, self._memory)
            begin += len(part)
        leaving, arriving = self._memory[: moves.leaving], self._memory[moves.computed :]
        self._messages.all_to_all(arriving, leaving, moves.sent, moves.received, moves.group)

    def arrive(self) -> torch.Tensor:
        """Wait; the rows in home order."""
        self._messages.wait()
        return self._memory[self._moves.leaving :]

    def close(self) -> None:
        """Nothing is read any more."""
        let_go(self._memory)


def _message(kind: Callable, tensor: torch.Tensor, peer: int, moves: ChunkRows) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=moves.group, group_peer=peer)
