"""The tokens of each rank that count, and how many they are."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from components.vocabulary.collectives import gather
from components.vocabulary.layout import VocabularyLayout

IGNORED = -100
"""Target of a token that has none, as everywhere in torch."""


@dataclass(frozen=True)
class Tokens:
    """This rank's tokens, those that are ignored left out.

    Attributes:
        total: tokens, ignored ones too.
        targets: int64 (counted,), their targets.
        counts: tokens that count, of each rank of the ring.
        rank: this rank in the ring.
        index: int64 (counted,), where among all tokens they are; None when none is ignored.
    """

    total: int
    targets: torch.Tensor
    counts: tuple[int, ...]
    rank: int
    index: torch.Tensor | None

    @property
    def counted(self) -> int:
        return self.counts[self.rank]

    def take(self, x: torch.Tensor, some: slice) -> torch.Tensor:
        """Rows of ``x`` (total, ...) that belong to ``some`` of the tokens that count.

        A view where no token is ignored.
        """
        return x[some] if self.index is None else x.index_select(0, self.index[some])

    def put(self, out: torch.Tensor, some: slice, rows: torch.Tensor) -> None:
        """Write ``rows`` to where ``take`` would read them."""
        if self.index is None:
            out[some] = rows
        else:
            out.index_copy_(0, self.index[some], rows.to(out.dtype))

    def restore(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """``rows`` (counted, ...) of the tokens that count as (total, ...), in the dtype of
        ``like``; 0 for ignored ones."""
        if self.index is None:
            return rows.to(like.dtype)
        out = like.new_zeros(self.total, *rows.shape[1:])
        return out.index_copy_(0, self.index, rows.to(like.dtype))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(counted,) values of the tokens that count as (total,), with 0 for ignored ones."""
        return self.restore(values, values)


def agree(
    targets: torch.Tensor, layout: VocabularyLayout, group: dist.ProcessGroup | None
) -> Tokens:
    """Find the tokens that count, and how many each rank of the ring has. Reads the device once.

    Args:
        targets: int64 (n,); n may differ between ranks.
        layout: of the vocabulary; its ring is ``group``.
        group: None for a ring of one rank.

    Raises:
        ValueError: on every rank of the ring, if a target of any rank is neither ``IGNORED`` nor
            an entry of the vocabulary. Ranks of other rings do not hear of it: they end with the
            timeout of the next collective that they share with this one.
    """
    counts_here = targets != IGNORED
    wrong = counts_here & ((targets < 0) | (targets >= layout.vocabulary))
    facts = torch.stack([counts_here.sum(), wrong.sum()])
    if group is None:
        found, rank = facts.unsqueeze(0), 0
    else:
        found, rank = gather(facts, group), dist.get_rank(group)
    counts, misses = zip(*found.tolist(), strict=True)
    if any(misses):
        raise ValueError(
            f"{sum(misses)} targets of rank(s) "
            f"{', '.join(str(r) for r, n in enumerate(misses) if n)} of the ring are no entries of "
            f"the vocabulary; legal: 0 to {layout.vocabulary - 1}, or {IGNORED} to ignore a token"
        )
    if counts[rank] == len(targets):
        return Tokens(len(targets), targets, counts, rank, None)
    index = torch.nonzero_static(counts_here, size=counts[rank]).squeeze(1)
    return Tokens(len(targets), targets[index], counts, rank, index)


def everyones(
    values: torch.Tensor, counts: tuple[int, ...], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """``values`` (counted,) of every rank of the ring: views of (counts[r],) each."""
    if group is None:
        return [values]
    longest = max(counts)
    mine = values.new_zeros(longest)
    mine[: len(values)] = values
    return [row[:count] for row, count in zip(gather(mine, group), counts, strict=True)]


def check_arguments(
    x: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    layout: VocabularyLayout,
    group: dist.ProcessGroup | None,
    rows: int,
    dw: torch.Tensor | None,
) -> None:
    """Raise ValueError where the arguments of a schedule do not belong together."""
    ring = 1 if group is None else dist.get_world_size(group)
    if ring != layout.ring:
        raise ValueError(f"group has {ring} ranks; the layout's ring has {layout.ring}")
    q = 0 if group is None else dist.get_rank(group)
    if x.dim() != 2 or targets.shape != x.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"x is {tuple(x.shape)} and targets {targets.dtype} {tuple(targets.shape)}; legal: "
            "(n, H) and torch.int64 (n,)"
        )
    shard = (layout.rows(q), x.shape[1])
    if tuple(w.shape) != shard or w.dtype != x.dtype or not w.is_contiguous():
        raise ValueError(
            f"w is {w.dtype} {tuple(w.shape)}; legal for ring rank {q}: contiguous {x.dtype} "
            f"{shard}"
        )
    if dw is not None and (tuple(dw.shape) != shard or not dw.is_contiguous()):
        raise ValueError(f"dw is {tuple(dw.shape)}; legal: contiguous {shard}")
    if rows < 1 or rows % layout.ring:
        raise ValueError(
            f"strips of {rows} rows; legal: a positive multiple of the ring's {layout.ring} ranks"
        )
