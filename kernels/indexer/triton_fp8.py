"""Rows to fp8 in Triton: read once, written once. See ``kernels.indexer.fp8``."""

import torch
import triton
import triton.language as tl

from kernels.indexer.fp8 import FORMAT, SMALLEST, Rows

_ROWS = 128


@triton.jit
def _hadamard(DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of row i and column j: -1 to the number of bits that both have."""
    i = tl.arange(0, DIM)
    bits = i[:, None] & i[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return (1 - 2 * (bits & 1)).to(tl.float32)


@triton.jit
def _higher(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _round_kernel(  # type: ignore[no-untyped-def]
    rows, values, factors, count, DIM: tl.constexpr, ROWS: tl.constexpr, ROTATE: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < count
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    x = tl.load(rows + at, mask=real[:, None], other=0.0)
    wide = x.to(tl.float32)
    if ROTATE:
        wide = tl.dot(x, _hadamard(DIM).to(x.dtype))
    # A nan has to come through, which max drops unless told.
    size = tl.reduce(tl.abs(wide), 1, _higher)
    bits = tl.maximum(size, SMALLEST).to(tl.int32, bitcast=True)
    # The least power of two that is no less than size / 448, where 448 is 1.75 x 2^8.
    power = (bits >> 23) - 8 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    factor = (power << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    finite = size < float("inf")
    factor = tl.where(finite, factor, float("nan"))
    inverse = tl.where(finite, inverse, float("nan"))
    tl.store(factors + row, factor, mask=real)
    tl.store(values + at, (wide * inverse[:, None]).to(tl.float8e4nv), mask=real[:, None])


def round_rows(x: torch.Tensor, rotate: bool) -> Rows:
    """See ``fp8.round_rows``; x is contiguous, bfloat16 or float16, d is 64 or 128."""
    values = torch.empty(x.shape, dtype=FORMAT, device=x.device)
    factors = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    count, dim = factors.numel(), x.shape[-1]
    with torch.cuda.device_of(x):
        if count:
            _round_kernel[(triton.cdiv(count, _ROWS),)](
                x, values, factors, count,
                DIM=dim, ROWS=_ROWS, ROTATE=rotate, SMALLEST=SMALLEST, num_warps=8,
            )  # fmt: skip
    return Rows(values, factors)
