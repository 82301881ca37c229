"""Chunks of one rank's tokens, with a count that a whole group agrees on.

Every chunk is exchanged by collectives, so all ranks of a group must cut their tokens into as many
chunks, however many tokens each holds: a rank with fewer takes part with smaller chunks, or empty
ones.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

Membership = Literal["strided", "contiguous"]

_MEMBERSHIPS = get_args(Membership)

_CODES = 8
"""Numbers that ranks compare: as many whatever settings a rank has, or they could not meet."""


class DisagreementError(ValueError):
    """Ranks of one group were given different settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRule:
    """How tokens are cut.

    Raises:
        ValueError: a number that cannot hold one token, or an unknown membership.
    """

    chunk_tokens: int
    """Tokens of one rank per chunk, as long as ``max_chunks`` allows."""

    max_chunks: int
    """Chunks at most; beyond chunk_tokens x max_chunks tokens the chunks grow instead."""

    membership: Membership = "strided"
    """Tokens of chunk i of K. "strided": i, i + K, i + 2K, ...; "contiguous": neighbours. These are
    routed alike, and a plan places an expert's tokens by their order, so contiguous chunks can send
    most of their tokens to one rank while strided ones repeat the spread of the whole."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_chunks"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; legal: 1 or more")
        if self.membership not in _MEMBERSHIPS:
            raise ValueError(f"membership is {self.membership!r}; legal: {', '.join(_MEMBERSHIPS)}")

    def cut(self, tokens: int, largest: int | None = None) -> "Partition":
        """The chunks of a rank whose group is known.

        Args:
            tokens: of this rank.
            largest: tokens of the fullest rank of the group; None: this rank's.

        Raises:
            ValueError: this rank holds more than the fullest.
        """
        most = tokens if largest is None else largest
        if not 0 <= tokens <= most:
            raise ValueError(f"tokens is {tokens}; legal: 0 to largest, which is {most}")
        chunks = max(1, min(-(-most // self.chunk_tokens), self.max_chunks))
        return Partition(tokens=tokens, chunks=chunks, largest=most, membership=self.membership)

    def chunks_on_device(self, largest: torch.Tensor) -> torch.Tensor:
        """``cut(...).chunks`` where the host does not know how many tokens the fullest rank holds.

        Args:
            largest: int64, on any device.

        Returns:
            int64, of the same shape and device. Nothing waits for it.
        """
        # No layer has as many tokens, and larger numbers do not fit.
        chunk_tokens = min(self.chunk_tokens, 2**62)
        return (-(-largest // chunk_tokens)).clamp(1, self.max_chunks)


WHOLE = ChunkRule(chunk_tokens=1, max_chunks=1)
"""One chunk, however many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The chunks of one rank's tokens. Recomputable from its fields: nothing else need be kept."""

    tokens: int
    """Tokens of this rank, N."""

    chunks: int
    """Chunks, K; the same on every rank of the group. Some may be empty."""

    largest: int
    """Tokens of the group's fullest rank; this one's where nobody asked."""

    membership: Membership

    @property
    def chunk_tokens(self) -> int:
        """Tokens of this rank's largest chunk, ceil(N / K)."""
        return -(-self.tokens // self.chunks)

    def rows(self, chunk: int) -> slice:
        """The tokens of a chunk, as a slice of a tensor whose first dimension is N."""
        if not 0 <= chunk < self.chunks:
            raise IndexError(f"chunk {chunk} of {self.chunks}")
        if self.membership == "strided":
            return slice(chunk, None, self.chunks)
        size = self.chunk_tokens
        return slice(min(chunk * size, self.tokens), min((chunk + 1) * size, self.tokens))

    def size(self, chunk: int) -> int:
        """Tokens of a chunk."""
        return len(range(*self.rows(chunk).indices(self.tokens)))


def chunk_of(
    tokens: int, chunks: int | torch.Tensor, membership: Membership, device: torch.device | str
) -> torch.Tensor:
    """The chunk of every token: int64 (N,).

    Args:
        chunks: K, 1 or more; as a tensor int64 of one number, on the device.
    """
    place = torch.arange(tokens, device=device)
    if membership == "strided":
        return place % chunks
    return place // -(-max(tokens, 1) // chunks)


def count_pairs(
    chunk: torch.Tensor, destination: torch.Tensor, chunks: int, others: int, dtype: torch.dtype
) -> torch.Tensor:
    """Routes of each chunk to each destination: (chunks, others), on the device of the inputs.

    Args:
        chunk: of every token, int64 (N,); below ``chunks``.
        destination: of every route, int64 (N, top_k); below ``others``.
        dtype: of the numbers.
    """
    cell = (chunk.unsqueeze(1) * others + destination).flatten()
    # Not bincount: on CUDA it waits for the device to learn how long its result is.
    table = cell.new_zeros(chunks * others, dtype=dtype)
    return table.scatter_add_(0, cell, torch.ones_like(cell, dtype=dtype)).view(chunks, others)


def agree(
    rule: ChunkRule,
    tokens: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    others: Mapping[str, int | float] | None = None,
) -> Partition:
    """Cut this rank's tokens into as many chunks as every other rank of its group.

    One all-reduce, as large whatever the settings, and one read by the host. Call it on every rank
    of the group, also on one without tokens, before anything is sent whose size they decide.

    Args:
        tokens: of this rank.
        group: whose ranks exchange chunks; None: this rank alone.
        device: where the group's collectives run.
        others: up to four further settings that the ranks must share, by name. Floats are compared
            to the bit.

    Raises:
        DisagreementError: the ranks follow different rules, or have other settings; raised on every
            rank alike.
    """
    if group is None:
        return rule.cut(tokens)
    settings = _Settings(rule, others or {})
    mine = settings.codes
    # The largest negative is the smallest: they differ exactly where ranks disagree.
    most = torch.tensor([tokens, *mine, *(-value for value in mine)], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    largest, *values = most.tolist()
    if values[: len(mine)] != [-value for value in values[len(mine) :]]:
        raise DisagreementError(_disagreement(settings, group, device))
    return rule.cut(tokens, largest)


class _Settings:
    """What ranks compare, as whole numbers of 64 bits."""

    def __init__(self, rule: ChunkRule, others: Mapping[str, int | float]) -> None:
        self._values: dict[str, int | float | str] = {
            "chunk_tokens": rule.chunk_tokens,
            "max_chunks": rule.max_chunks,
            "membership": rule.membership,
            **others,
        }

    @property
    def codes(self) -> list[int]:
        """Of which settings there are, and of each; zeros up to ``_CODES``."""
        names = zlib.crc32(" ".join(self._values).encode())
        codes = [names, *(_code(value) for value in self._values.values())]
        return codes + [0] * (_CODES - len(codes))

    def read(self, codes: Sequence[int]) -> str:
        """Another rank's codes as text."""
        if codes[0] != self.codes[0]:
            return "those of another component"
        values = zip(self._values.items(), codes[1:], strict=False)
        return ", ".join(f"{name} {_value(code, mine)!r}" for (name, mine), code in values)


def _code(value: int | float | str) -> int:
    if isinstance(value, str):
        return _MEMBERSHIPS.index(value)
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    # No layer has as many tokens: beyond it all numbers mean the same.
    return min(value, 2**62)


def _value(code: int, like: int | float | str) -> int | float | str:
    if isinstance(like, str):
        return _MEMBERSHIPS[code]
    if isinstance(like, float):
        return struct.unpack("<d", struct.pack("<q", code))[0]
    return code


def _disagreement(settings: _Settings, group: dist.ProcessGroup, device: torch.device) -> str:
    """Who follows which settings. A collective call."""
    here = torch.tensor(settings.codes, device=device)
    everyone = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, here, group=group)
    followers: dict[tuple[int, ...], list[int]] = {}
    for rank, theirs in zip(dist.get_process_group_ranks(group), everyone, strict=True):
        followers.setdefault(tuple(theirs.tolist()), []).append(rank)
    lines = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: "
        f"{settings.read(codes)}"
        for codes, ranks in followers.items()
    ]
    return (
        "ranks that exchange experts' tokens follow different settings, so what they send would "
        f"not match; start all of them with the same recipe. {'; '.join(lines)}"
    )
