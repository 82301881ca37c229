"""Where documents begin in a batch of packed rows: the one object every mixer is given."""

from dataclasses import dataclass, field, replace

import torch

from kernels.dsa.pooling import Pools, find_pools


@dataclass(frozen=True)
class Documents:
    """B rows of L tokens, flattened to T = B * L tokens and cut into N documents.

    A row's first token begins a document whatever comes before it, so that no mixer has to know
    about rows. Mixers decide by ``position`` and ``start``, never by a token's place in the batch.

    Attributes:
        position: int64 (T,), distance from the document's first token in this batch.
        start: int64 (T,), flat index of that first token.
        lengths: tokens of each document, on the host; they add up to T.
    """

    position: torch.Tensor
    start: torch.Tensor
    lengths: tuple[int, ...]
    _pools: dict[int, Pools] = field(default_factory=dict, repr=False, compare=False)

    def pools(self, size: int) -> Pools:
        """All complete pools of ``size`` tokens; found once for all layers that ask."""
        if size not in self._pools:
            self._pools[size] = find_pools(self.lengths, size, self.start.device)
        return self._pools[size]

    def rows(self, begin: int, stop: int) -> "Documents":
        """The same documents, asked about by the tokens ``begin`` to ``stop`` - 1 alone.

        ``position`` and ``start`` are theirs, lengths and pools those of the whole batch.
        """
        return replace(self, position=self.position[begin:stop], start=self.start[begin:stop])

    @staticmethod
    def from_positions(positions: torch.Tensor) -> "Documents":
        """Find the documents in what the data loader calls ``positions``.

        One wait for the device per call: the lengths come to the host.

        Args:
            positions: integers (B, L); a document goes on where they go up by one.
        """
        new = torch.ones_like(positions, dtype=torch.bool)
        new[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        first = new.flatten().nonzero().squeeze(1)
        return Documents._from_starts(first, positions.numel())

    @staticmethod
    def from_lengths(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> "Documents":
        """Documents of the given lengths (tokens, all above 0), one after the other."""
        ends = torch.tensor(lengths, device=device).cumsum(0)
        return Documents._from_starts(ends - torch.tensor(lengths, device=device), sum(lengths))

    @staticmethod
    def _from_starts(first: torch.Tensor, size: int) -> "Documents":
        lengths = torch.cat([first, first.new_tensor([size])]).diff()
        start = first.repeat_interleave(lengths, output_size=size)
        position = torch.arange(size, device=first.device) - start
        return Documents(position, start, tuple(lengths.tolist()))
