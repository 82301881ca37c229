"""The buffer that every strip of logits of a pass is computed in."""

import torch

_ROW_BYTES = 128
"""Rows start at multiples of it: matrix products and kernels are slow on rows that do not."""


def strip_buffer(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """An uninitialised (rows, columns) in the dtype and on the device of ``like``; each row begins
    at a multiple of 128 bytes, and what is between two rows is zero.
    """
    unit = _ROW_BYTES // like.element_size()
    padded = -(-columns // unit) * unit
    buffer = like.new_empty(rows, padded)
    # oneDNN's products read beyond the columns and multiply by zero, which nan and inf survive.
    buffer[:, columns:] = 0
    return buffer[:, :columns]


def strip_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """What ``strip_buffer`` takes."""
    unit = _ROW_BYTES // dtype.itemsize
    return rows * -(-columns // unit) * unit * dtype.itemsize
