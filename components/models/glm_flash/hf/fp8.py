"""Block-scaled 8-bit floats: one float32 factor per 128 x 128 values."""

import math

import torch

BLOCK = 128
"""Rows and columns that share a factor; the last block of a dimension may be smaller."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the factors of a weight of this shape: its last two dimensions in blocks."""
    *leading, rows, columns = shape
    return (*leading, math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, row: int = 0, column: int = 0
) -> torch.Tensor:
    """Multiply each value by its block's factor.

    Args:
        values: float8_e4m3fn (rows, columns), a part of a weight.
        scales: float32, the factors of the whole weight.
        row: first row of the part in the weight.
        column: first column of the part in the weight.

    Returns:
        float32 (rows, columns).
    """
    rows, columns = values.shape
    result = values.to(torch.float32)
    column_blocks = torch.arange(column, column + columns) // BLOCK
    # By row blocks: a full-size tensor of factors would double the memory.
    for block in range(row // BLOCK, math.ceil((row + rows) / BLOCK)):
        start, stop = max(block * BLOCK - row, 0), min((block + 1) * BLOCK - row, rows)
        result[start:stop] *= scales[block].to(torch.float32)[column_blocks]
    return result
