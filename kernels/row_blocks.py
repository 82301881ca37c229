"""Work on a few rows at a time, so that copies in full precision never exist for all of them."""

from collections.abc import Iterator

ELEMENTS = 2**24
"""Numbers of one intermediate tensor of a block: 64 MiB in float32."""


def row_blocks(rows: int, width: int, elements: int | None = None) -> Iterator[slice]:
    """Cut ``rows`` rows of ``width`` numbers into blocks of at most ``elements`` numbers
    (``ELEMENTS`` unless given).

    No rows are one empty block, so that a loop over blocks sees every dtype and shape once.
    """
    step = max(1, (elements or ELEMENTS) // max(1, width))
    for begin in range(0, max(rows, 1), step):
        yield slice(begin, min(begin + step, rows))
