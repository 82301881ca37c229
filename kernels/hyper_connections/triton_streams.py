"""Reading and merging the streams in Triton: one pass over their rows each, CUDA only.

A program works on one token. Backward passes hold their scalar products per thread until the end of
the row: vectors of 16 bytes are one axis of a tile, so that sums along it stay within a thread.
Places of rows are 64-bit.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_BACK_BLOCK = 1024
_WARPS = 4


@triton.jit
def _read_kernel(  # type: ignore[no-untyped-def]
    streams, pre, x, dim, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = d < dim
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(N):
        y = tl.load(streams + (t * N + i) * dim + d, mask=seen).to(tl.float32)
        total += tl.load(pre + t * N + i) * y
    tl.store(x + t * dim + d, total.to(x.dtype.element_ty), mask=seen)


@triton.jit
def _read_back_kernel(  # type: ignore[no-untyped-def]
    streams, dx, dpre, dim, N: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    sums = ()
    for _ in tl.static_range(N):
        sums = sums + (tl.zeros((LANES,), tl.float32),)  # type: ignore[assignment]
    for begin in range(0, dim, LANES * VECTOR):
        d = begin + lane
        seen = d < dim
        g = tl.load(dx + t * dim + d, mask=seen, other=0.0).to(tl.float32)
        more = ()
        for i in tl.static_range(N):
            y = tl.load(streams + (t * N + i) * dim + d, mask=seen, other=0.0).to(tl.float32)
            more = more + (sums[i] + tl.sum(y * g, 1),)  # type: ignore[assignment]
        sums = more
    for i in tl.static_range(N):
        tl.store(dpre + t * N + i, tl.sum(sums[i], 0))


@triton.jit
def _weight(weights, at, narrow: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounded to the streams' dtype, as the published model does."""
    return tl.load(weights + at).to(narrow).to(tl.float32)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    streams, out, post, mix, merged, dim, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = d < dim
    narrow: tl.constexpr = merged.dtype.element_ty
    y = tl.load(out + t * dim + d, mask=seen).to(tl.float32)
    rows = ()
    for i in tl.static_range(N):
        rows = rows + (tl.load(streams + (t * N + i) * dim + d, mask=seen).to(tl.float32),)  # type: ignore[assignment]
    for j in tl.static_range(N):
        total = _weight(post, t * N + j, narrow) * y
        for i in tl.static_range(N):
            total += _weight(mix, (t * N + i) * N + j, narrow) * rows[i]
        tl.store(merged + (t * N + j) * dim + d, total.to(narrow), mask=seen)


@triton.jit
def _merge_back_kernel(  # type: ignore[no-untyped-def]
    grad, streams, out, post, mix, dstreams, dout, dpost, dmix, dim,
    N: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    narrow: tl.constexpr = dstreams.dtype.element_ty
    # Of ``out`` first, then of stream after stream; each with all outgoing ones.
    sums = ()
    for _ in tl.static_range(N * (N + 1)):
        sums = sums + (tl.zeros((LANES,), tl.float32),)  # type: ignore[assignment]
    for begin in range(0, dim, LANES * VECTOR):
        d = begin + lane
        seen = d < dim
        pulls, more = (), ()
        for j in tl.static_range(N):
            at = grad + (t * N + j) * dim + d
            pulls = pulls + (tl.load(at, mask=seen, other=0.0).to(tl.float32),)  # type: ignore[assignment]
        y = tl.load(out + t * dim + d, mask=seen, other=0.0).to(tl.float32)
        total = tl.zeros((LANES, VECTOR), tl.float32)
        for j in tl.static_range(N):
            total += _weight(post, t * N + j, narrow) * pulls[j]
            more = more + (sums[j] + tl.sum(y * pulls[j], 1),)  # type: ignore[assignment]
        tl.store(dout + t * dim + d, total.to(narrow), mask=seen)
        for i in tl.static_range(N):
            place = (t * N + i) * dim + d
            y = tl.load(streams + place, mask=seen, other=0.0).to(tl.float32)
            total = tl.zeros((LANES, VECTOR), tl.float32)
            for j in tl.static_range(N):
                total += _weight(mix, (t * N + i) * N + j, narrow) * pulls[j]
                more = more + (sums[N + i * N + j] + tl.sum(y * pulls[j], 1),)  # type: ignore[assignment]
            tl.store(dstreams + place, total.to(narrow), mask=seen)
        sums = more
    for j in tl.static_range(N):
        tl.store(dpost + t * N + j, tl.sum(sums[j], 0))
    for k in tl.static_range(N * N):
        tl.store(dmix + t * N * N + k, tl.sum(sums[N + k], 0))


def _vectors(streams: torch.Tensor) -> dict[str, int]:
    vector = 16 // streams.itemsize
    return {"LANES": _BACK_BLOCK // vector, "VECTOR": vector, "num_warps": _WARPS}


def read(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """``sum_i pre_i * streams_i``, rounded once.

    Args:
        streams: (T, n, D), contiguous, T >= 1.
        pre: float32 (T, n), contiguous.

    Returns:
        (T, D).
    """
    tokens, n, dim = streams.shape
    x = streams.new_empty(tokens, dim)
    _read_kernel[(tokens, triton.cdiv(dim, _BLOCK))](
        streams, pre, x, dim, N=n, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return x


def read_backward(streams: torch.Tensor, dx: torch.Tensor) -> torch.Tensor:
    """The gradient of ``pre``: float32 (T, n). Both contiguous; dx (T, D)."""
    tokens, n, dim = streams.shape
    dpre = streams.new_empty(tokens, n, dtype=torch.float32)
    _read_back_kernel[(tokens,)](streams, dx, dpre, dim, N=n, **_vectors(streams))
    return dpre


def merge(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """See ``op.merge``; all contiguous, T >= 1."""
    tokens, n, dim = streams.shape
    merged = torch.empty_like(streams)
    _merge_kernel[(tokens, triton.cdiv(dim, _BLOCK))](
        streams, out, post, mix, merged, dim, N=n, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return merged


def merge_backward(
    grad: torch.Tensor,
    streams: torch.Tensor,
    out: torch.Tensor,
    post: torch.Tensor,
    mix: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``op.merge_backward``; all contiguous, T >= 1."""
    tokens, n, dim = streams.shape
    dstreams, dout = torch.empty_like(streams), torch.empty_like(out)
    found = dstreams, dout, torch.empty_like(post), torch.empty_like(mix)
    _merge_back_kernel[(tokens,)](
        grad, streams, out, post, mix, *found, dim, N=n, **_vectors(streams)
    )
    return found
