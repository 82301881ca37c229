"""Tensors that go round a ring of ranks, one hop while the rank works on what it holds."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist


class Hop:
    """Messages on their way. Until ``wait`` returns, what is sent must not change and what is
    received must not be read."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor]) -> None:
        self._works = works
        self._tensors = tensors  # alive until they have arrived

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors = ()


class Ring:
    """The ranks of a group, each with a next and a previous one; None is a ring of one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def owner(self, meeting: int) -> int:
        """Whose tensor a rank holds in a meeting, when tensors move to the next rank after each."""
        return (self.rank - meeting) % self.size

    def start(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> Hop:
        """Send to the next rank, receive from the previous one. Empty tensors make no message."""
        messages = []
        if outgoing.numel():
            to = (self.rank + 1) % self.size
            messages.append(dist.P2POp(dist.isend, outgoing, group=self._group, group_peer=to))
        if incoming.numel():
            source = (self.rank - 1) % self.size
            messages.append(dist.P2POp(dist.irecv, incoming, group=self._group, group_peer=source))
        works = dist.batch_isend_irecv(messages) if messages else []
        return Hop(works, (outgoing, incoming))


def travelling(
    ring: Ring, mine: torch.Tensor, rows: Sequence[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Every rank's tensor in turn, mine first: (its owner, the tensor), ``ring.size`` times.

    The next one arrives while the caller works on this one; two are held besides ``mine``.

    Args:
        mine: (rows[ring.rank], ...), contiguous; must not change meanwhile.
        rows: rows of each rank's tensor; all other dimensions are equal.
    """
    spare: list[torch.Tensor] = []
    held = mine
    for meeting in range(ring.size):
        if meeting == ring.size - 1:
            yield ring.owner(meeting), held
            return
        if len(spare) < 2:
            spare.append(mine.new_empty(max(rows), *mine.shape[1:]))
        incoming = spare[meeting % 2][: rows[ring.owner(meeting + 1)]]
        hop = ring.start(held, incoming)
        yield ring.owner(meeting), held
        hop.wait()
        held = incoming


class RidingSum:
    """A sum for each tensor that travels: it rides along, every rank adds its part, and it ends at
    the owner.

    What the previous ranks added arrives while this rank works out its own part; three sums are
    held at most (one, in a ring of one rank), each from when it is needed.

    Args:
        ring: the ranks.
        rows: rows of each rank's sum.
        width: its columns.
        like: gives the device.
        dtype: of the sums.
        first: meeting of the first parts, 0 or 1. With 1 no rank begins its own tensor's sum, which
            saves a hop, and a ring of one rank has no sums.
    """

    def __init__(
        self,
        ring: Ring,
        rows: Sequence[int],
        width: int,
        like: torch.Tensor,
        dtype: torch.dtype,
        first: int = 0,
    ) -> None:
        self._ring, self._rows = ring, rows
        self._none = like.new_empty(0, width, dtype=dtype)
        self._free: list[torch.Tensor] = []
        self._meeting = first
        self._sum: torch.Tensor | None = None
        self._incoming: torch.Tensor | None = None
        self._part: torch.Tensor | None = None
        self._hop: Hop | None = None

    def begin(self) -> torch.Tensor:
        """Uninitialised memory for this rank's part of the sum of the tensor it holds now. The sum
        of the one before moves on meanwhile."""
        owner = self._ring.owner(self._meeting)
        self._send(owner)
        self._part = self._take()
        return self._part[: self._rows[owner]]

    def end(self) -> None:
        """The part is there: add it to what has arrived."""
        assert self._part is not None
        own, self._part = self._part, None
        arrived = self._receive()
        if arrived is None:
            self._sum = own
        else:
            rows = self._rows[self._ring.owner(self._meeting)]
            arrived[:rows] += own[:rows]
            self._free.append(own)
            self._sum = arrived
        self._meeting += 1

    def home(self) -> torch.Tensor:
        """After all meetings: the whole sum of this rank's own tensor, (rows[ring.rank], width)."""
        self._send(self._ring.rank)
        arrived = self._receive()
        mine = self._sum if arrived is None else arrived
        assert mine is not None
        return mine[: self._rows[self._ring.rank]]

    def _send(self, arriving: int) -> None:
        """The finished sum goes on; that of owner ``arriving`` comes in."""
        if self._sum is None or self._ring.size == 1:
            return
        leaving = self._ring.owner(self._meeting - 1)
        self._incoming = self._take()
        self._hop = self._ring.start(
            self._sum[: self._rows[leaving]], self._incoming[: self._rows[arriving]]
        )

    def _take(self) -> torch.Tensor:
        """Uninitialised; after three, one that is free."""
        if self._free:
            return self._free.pop()
        return self._none.new_empty(max(self._rows), *self._none.shape[1:])

    def _receive(self) -> torch.Tensor | None:
        if self._hop is None:
            return None
        assert self._incoming is not None and self._sum is not None
        self._hop.wait()
        self._free.append(self._sum)
        arrived = self._incoming
        self._hop = self._incoming = self._sum = None
        return arrived
