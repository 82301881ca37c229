"""Cut queries into windows whose scores fit a cap of memory. Host arithmetic only."""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.packed import bounds

GROUP = 16
"""Pools whose best score is kept beside the scores: consecutive, from a multiple of 16."""
TILE = 64
"""Windows begin at multiples of so many pools and are multiples of it wide."""
CAP_BYTES = 256 * 2**20
"""Default memory of one window. At 128K tokens that is about 32 windows of 1 ms each: long beside
a launch, while scores and all else of an indexer at 32K tokens stay far below 1.2 GiB."""
_ROWS = 32


class Window(NamedTuple):
    """Queries and the pools that they may choose, numbered through the batch.

    Attributes:
        q0, q1: the queries, counted from the first of the call.
        p0: the first pool, a multiple of ``TILE``.
        width: pools, a multiple of ``TILE``; 0 if no query may choose any.
        widest: most pools that one of the queries may choose.
    """

    q0: int
    q1: int
    p0: int
    width: int
    widest: int


class Workspace(NamedTuple):
    """What one window needs beside inputs and results.

    Attributes:
        scores: float32 (rows, width).
        best: float32 (rows, width / GROUP), the best score of each group.
        groups: int32 (rows, count), the groups that are looked into, ascending, then -1; or
            ``triton_topk.DONE`` first.
    """

    scores: torch.Tensor
    best: torch.Tensor
    groups: torch.Tensor


def most_groups(pools: int) -> int:
    """Most groups that ``pools`` consecutive ones touch, whatever they begin at."""
    return (pools + 2 * GROUP - 2) // GROUP


def window_bytes(rows: int, width: int, count: int) -> int:
    """Bytes of a ``Workspace``."""
    return 4 * rows * (width + width // GROUP + count)


def workspaces(
    windows: tuple[Window, ...], count: int, device: torch.device
) -> Iterator[tuple[Window, Workspace]]:
    """Each window with memory for it; all of them share one allocation, the largest's."""
    most = max((window_bytes(w.q1 - w.q0, w.width, count) for w in windows), default=0)
    memory = torch.empty(most // 4, dtype=torch.float32, device=device)
    for window in windows:
        rows, width = window.q1 - window.q0, window.width
        sizes = [rows * width, rows * width // GROUP, rows * count]
        scores, best, groups = memory[: sum(sizes)].split(sizes)
        yield (
            window,
            Workspace(
                scores.view(rows, width),
                best.view(rows, width // GROUP),
                groups.view(torch.int32).view(rows, count),
            ),
        )


def plan(
    lengths: tuple[int, ...],
    size: int,
    *,
    count: int,
    cap_bytes: int = CAP_BYTES,
    begin: int = 0,
    stop: int | None = None,
) -> tuple[Window, ...]:
    """Windows of consecutive queries, each as large as the cap lets it be.

    Args:
        lengths: tokens of the documents.
        size: tokens per pool.
        count: pools to choose.
        cap_bytes: most bytes of one window's ``Workspace``.
        begin, stop: the tokens that ask, by default all.

    Raises:
        ValueError: ``cap_bytes`` does not hold even one query.
    """
    visible = _Visible(lengths, size)
    last = visible.tokens if stop is None else stop
    found, token = [], begin
    while token < last:
        first_pool = visible.range(token)[0] // TILE * TILE

        def nbytes(end: int, token: int = token, first_pool: int = first_pool) -> int:
            width = _whole_tiles(visible.range(end - 1)[1] - first_pool)
            return window_bytes(end - token, width, count)

        # Bytes grow with every query, so the last end that fits is found by bisection.
        fits = bisect.bisect_right(range(token + 1, last + 1), cap_bytes, key=nbytes)
        if fits == 0:
            raise ValueError(
                f"cap_bytes: {cap_bytes} bytes hold no query of {visible.range(token)[1]} pools; "
                f"legal: at least {nbytes(token + 1)} here"
            )
        if fits > _ROWS and token + fits < last:
            fits -= fits % _ROWS  # kernels take up to 32 queries at a time
        end = token + fits
        width = _whole_tiles(visible.range(end - 1)[1] - first_pool)
        widest = visible.most(token, end)
        if widest == 0:
            width = 0
        found.append(Window(token - begin, end - begin, first_pool, width, widest))
        token = end
    return tuple(found)


def _whole_tiles(pools: int) -> int:
    return -(-pools // TILE) * TILE


class _Visible:
    """Which pools a token may choose, from the lengths of the documents."""

    def __init__(self, lengths: tuple[int, ...], size: int) -> None:
        self.size = size
        self.begins = bounds(lengths)
        self.tokens = self.begins[-1]
        self.earlier = bounds(tuple(length // size for length in lengths))

    def range(self, token: int) -> tuple[int, int]:
        """The first pool of the token's document, and the end of those the token may choose."""
        document = bisect.bisect_right(self.begins, token) - 1
        base = self.earlier[document]
        return base, base + (token + 1 - self.begins[document]) // self.size

    def most(self, token: int, end: int) -> int:
        """Most pools that one of the tokens ``token`` to ``end`` - 1 may choose."""
        most, document = 0, bisect.bisect_right(self.begins, token) - 1
        while document < len(self.begins) - 1 and self.begins[document] < end:
            seen = min(end, self.begins[document + 1]) - self.begins[document]
            most = max(most, seen // self.size)
            document += 1
        return most
