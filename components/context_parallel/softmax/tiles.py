"""Who sees whom in a block, tile by tile, as FlexAttention takes it.

Derived from where rows' keys begin and end, so that the work is by pairs of tiles, not of tokens:
a mask of 1M tokens by pairs takes longer than the attention.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from components.context_parallel.softmax.kernel import Block

TILE = 128
"""Tokens of a tile's side."""

NOWHERE = 2**61
"""Place of tokens that fill up a tile: after every query's, so that none sees them. Nor do they see
each other: their documents start behind it."""


class View:
    """A block's places, filled up to whole tiles, and who sees whom, by window.

    At least two tiles: compiled code takes a size of 1 for a constant.

    Attributes:
        queries, keys, start: int64, places of queries and keys, and of the documents' starts.
    """

    def __init__(self, block: Block) -> None:
        self.queries, self.keys = _fill(block.query_places()), _fill(block.key_places())
        self.start = _fill(block.start, 2 * NOWHERE)
        self._counts = len(block.start), block.keys
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> BlockMask:
        """Made once for all layers."""
        if window not in self._masks:
            partial, full = self._tiles(window)
            self._masks[window] = BlockMask.from_kv_blocks(
                *_listed(partial),
                *_listed(full),
                BLOCK_SIZE=TILE,
                mask_mod=self._seen(window),
                seq_lengths=(len(self.queries), len(self.keys)),
            )
        return self._masks[window]

    def _tiles(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """bool (tiles of queries, of keys): in which some keys are seen, in which all are."""
        queries, keys = self._counts
        real = torch.arange(len(self.queries), device=self.queries.device) < queries
        first = self.start
        if window is not None:
            first = torch.maximum(first, self.queries - window + 1)
        # Rows are consecutive and see themselves last, so the keys that a tile's rows see between
        # them are consecutive as well.
        last = torch.where(real, self.queries, -1)
        first, last, real = (t.unflatten(0, (-1, TILE)) for t in (first, last, real))
        tiles = self.keys.unflatten(0, (-1, TILE))
        begin, end = tiles[:, 0], tiles[:, -1].clamp(max=self.keys[keys - 1])
        some = (first.amin(1)[:, None] <= end) & (begin <= last.amax(1)[:, None])
        full = (first.amax(1)[:, None] <= begin) & (tiles[:, -1] <= last.amin(1)[:, None])
        full &= real.all(1)[:, None]
        return some & ~full, full

    def _seen(self, window: int | None) -> Callable[..., torch.Tensor]:
        # Tensors: numbers, and this object's identity, would be constants of the compiled code.
        queries, keys, start = self.queries, self.keys, self.start

        def of_document(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
        ) -> torch.Tensor:
            return (keys[k] >= start[q]) & (keys[k] <= queries[q])

        if window is None:
            return of_document

        def of_window(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
        ) -> torch.Tensor:
            return of_document(b, h, q, k) & (queries[q] - keys[k] < window)

        return of_window


def _fill(places: torch.Tensor, value: int = NOWHERE) -> torch.Tensor:
    tiles = max(2, -(-len(places) // TILE))
    return F.pad(places, (0, tiles * TILE - len(places)), value=value)


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles of each row, int32 (1, 1, rows), and which, these first (1, 1, rows, all)."""
    counts = tiles.sum(1, dtype=torch.int32)
    which = tiles.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], which[None, None]
