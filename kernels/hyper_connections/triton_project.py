"""The projection of all streams in Triton, and its gradients: matrix products, CUDA only.

The 24 outputs (four streams) are a narrow side of every product, so memory sets the time. Weights
stay in the second-level cache, or in registers. Places of rows are 64-bit.
"""

import torch
import triton
import triton.language as tl

_SPLIT_TOKENS = 1024
"""Tokens of one partial sum of the weight's gradient: a loop long enough to hide its start."""
_MOST_SPLITS = 16


@triton.jit(do_not_specialize=["tokens"])
def _project_kernel(  # type: ignore[no-untyped-def]
    x, fn, z, norm, tokens, width, eps,
    M: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    out = tl.arange(0, PADDED)
    total = tl.zeros((ROWS, PADDED), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for begin in tl.range(0, width, COLS, num_stages=STAGES):
        col = begin + tl.arange(0, COLS)
        seen = col < width
        a = tl.load(
            x + row[:, None] * width + col[None, :], mask=inside[:, None] & seen[None, :], other=0.0
        )
        w = tl.load(
            fn + out[:, None] * width + col[None, :],
            mask=(out < M)[:, None] & seen[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
        wide = a.to(tl.float32)
        square += tl.sum(wide * wide, 1)
    factor = tl.rsqrt(square / width + eps)
    tl.store(norm + row, factor, mask=inside)
    tl.store(
        z + row[:, None] * M + out[None, :], total * factor[:, None],
        mask=inside[:, None] & (out < M)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "split"])
def _gradients_kernel(  # type: ignore[no-untyped-def]
    x, dx, dheld, pre, dz, pull, fn, dstreams, partial, tokens, dim, split,
    N: tl.constexpr, M: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HELD: tl.constexpr, WEIGHT: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs have the same columns of different streams, which share ``dx``.
    stream = tl.program_id(0) % N
    d = tl.program_id(0) // N * COLS + tl.arange(0, COLS)
    seen, col, width = d < dim, stream * dim + d, N * dim
    out = tl.arange(0, PADDED)
    of_weight = (out < M)[:, None] & seen[None, :]
    w = tl.load(fn + out[:, None] * width + col[None, :], mask=of_weight, other=0.0)
    total = tl.zeros((COLS, PADDED), tl.float32)
    first = tl.program_id(1) * split
    stop = tl.minimum(first + split, tokens)
    for begin in tl.range(first, stop, ROWS, num_stages=STAGES):
        row = begin + tl.arange(0, ROWS).to(tl.int64)
        inside = row < stop
        both = inside[:, None] & seen[None, :]
        at = row[:, None] * width + col[None, :]
        a = tl.load(x + at, mask=both, other=0.0)
        g = tl.load(dx + row[:, None] * dim + d[None, :], mask=both, other=0.0).to(tl.float32)
        wide = tl.load(
            dz + row[:, None] * M + out[None, :],
            mask=inside[:, None] & (out < M)[None, :], other=0.0,
        )  # fmt: skip
        high = wide.to(a.dtype)
        back = tl.dot(high, w, input_precision="ieee")
        if WEIGHT:
            total = tl.dot(tl.trans(a), high, total, input_precision="ieee")
        if NARROW:
            # The part that rounding took, so that products are of numbers with twice the digits.
            low = (wide - high.to(tl.float32)).to(a.dtype)
            back = tl.dot(low, w, back, input_precision="ieee")
            if WEIGHT:
                total = tl.dot(tl.trans(a), low, total, input_precision="ieee")
        weight = tl.load(pre + row * N + stream, mask=inside, other=0.0)
        along = tl.load(pull + row, mask=inside, other=0.0)
        back += weight[:, None] * g - along[:, None] * a.to(tl.float32)
        if HELD:
            back += tl.load(dheld + at, mask=both, other=0.0).to(tl.float32)
        tl.store(dstreams + at, back.to(dstreams.dtype.element_ty), mask=both)
    if WEIGHT:
        place = (tl.program_id(1).to(tl.int64) * M + out[:, None]) * width + col[None, :]
        tl.store(partial + place, tl.trans(total), mask=of_weight)


def project(
    streams: torch.Tensor, fn: torch.Tensor, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``z`` and ``norm`` of ``naive.Read``.

    Args:
        streams: (T, n, D), contiguous, T >= 1.
        fn: (n^2 + 2n, n * D), contiguous, of the same dtype.
        norm_eps: added to the mean square.
    """
    tokens, m, width = len(streams), len(fn), fn.shape[1]
    z = streams.new_empty(tokens, m, dtype=torch.float32)
    norm = streams.new_empty(tokens, dtype=torch.float32)
    rows, cols, stages = (64, 128, 4) if streams.itemsize == 2 else (16, 64, 2)
    _project_kernel[(triton.cdiv(tokens, rows),)](
        streams, fn, z, norm, tokens, width, norm_eps,
        M=m, PADDED=padded(m), ROWS=rows, COLS=cols, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return z, norm


def gradients(
    streams: torch.Tensor,
    dx: torch.Tensor,
    dheld: torch.Tensor | None,
    pre: torch.Tensor,
    dz: torch.Tensor,
    pull: torch.Tensor,
    fn: torch.Tensor,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dheld + pre * dx + dz @ fn - pull * streams``, rounded once, and ``dz.T @ streams``.

    Sums over tokens are made in parts that depend on the number of tokens alone: two runs are equal
    to the bit. ``dz`` enters products as the sum of two numbers of the streams' dtype.

    Args:
        streams: (T, n, D), contiguous, as all of these; T >= 1.
        dx: (T, D), dheld: (T, n, D) or None: of the same dtype.
        pre: (T, n), dz: (T, n^2 + 2n), pull: (T,): float32.
        fn: (n^2 + 2n, n * D), of the streams' dtype.
        of_weight: whether the second result is wanted.

    Returns:
        (T, n, D) in the streams' dtype; (n^2 + 2n, n * D) in that of ``fn``, empty if not wanted.
    """
    (tokens, n, dim), m = streams.shape, len(fn)
    back = torch.empty_like(streams)
    split = max(_SPLIT_TOKENS, triton.cdiv(tokens, _MOST_SPLITS))
    splits = triton.cdiv(tokens, split)
    partial = fn.new_empty(splits if of_weight else 0, m, n * dim, dtype=torch.float32)
    narrow = streams.itemsize == 2
    rows, cols, stages = (64, 64, 3) if narrow else (16, 64, 1)
    _gradients_kernel[(n * triton.cdiv(dim, cols), splits)](
        streams, dx, streams if dheld is None else dheld, pre, dz, pull, fn, back, partial,
        tokens, dim, split, N=n, M=m, PADDED=padded(m), ROWS=rows, COLS=cols,
        HELD=dheld is not None, WEIGHT=of_weight, NARROW=narrow, STAGES=stages,
        num_warps=4,
    )  # fmt: skip
    return back, partial.sum(0).to(fn.dtype) if of_weight else fn.new_empty(0)


def padded(outputs: int) -> int:
    """A side of a matrix product that holds so many outputs."""
    return max(16, triton.next_power_of_2(outputs))
