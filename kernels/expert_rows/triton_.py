"""Moving, weighing and summing experts' rows in Triton: one program a row, one pass, CUDA only.

See ``op`` for what they mean. Places of rows are 64-bit: a chunk has more than 2^31 numbers.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_WARPS = 4


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    rows, index, out, width, row_stride, out_stride, BACK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    other = tl.load(index + i)
    if BACK:
        source, target = rows + i * row_stride, out + other * out_stride
    else:
        source, target = rows + other * row_stride, out + i * out_stride
    lane = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        at = start + lane
        tl.store(target + at, tl.load(source + at, mask=at < width), mask=at < width)


@triton.jit
def _weigh_kernel(  # type: ignore[no-untyped-def]
    rows, weights, width, row_stride, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + i).to(tl.float32)
    begin = rows + i * row_stride
    lane = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        at = start + lane
        y = tl.load(begin + at, mask=at < width).to(tl.float32)
        tl.store(begin + at, (y * weight).to(rows.dtype.element_ty), mask=at < width)


@triton.jit
def _gated(g, u, limit):  # type: ignore[no-untyped-def]
    """Both factors within limits, the sigmoid of the first."""
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    return g, u, 1.0 / (1.0 + tl.exp(-g))


@triton.jit
def _swiglu_kernel(  # type: ignore[no-untyped-def]
    gate, up, back, weights, hidden, dots, width, limit, BACK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    narrow = gate.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at, seen = i * width + start + lane, start + lane < width
        given_g = tl.load(gate + at, mask=seen, other=0.0).to(tl.float32)
        given_u = tl.load(up + at, mask=seen, other=0.0).to(tl.float32)
        g, u, sigmoid = _gated(given_g, given_u, limit)
        # Rounded as the activation alone would be, so that both passes agree.
        gated = (g * sigmoid).to(narrow).to(tl.float32)
        h = (gated * u).to(narrow)
        if BACK:
            pull = tl.load(back + at, mask=seen, other=0.0).to(tl.float32)
            products += h.to(tl.float32) * pull
            pull = pull * tl.load(weights + i).to(tl.float32)
            of_g = pull * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
            of_u = pull * gated
            of_g = tl.where(given_g > limit, 0.0, of_g)
            of_u = tl.where(tl.abs(given_u) > limit, 0.0, of_u)
            tl.store(gate + at, of_g.to(narrow), mask=seen)
            tl.store(up + at, of_u.to(narrow), mask=seen)
        # Last: it may lie where ``back`` was.
        tl.store(hidden + at, h, mask=seen)
    if BACK:
        tl.store(dots + i, tl.sum(products, 0))


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    rows, place, weights, out, width, row_stride, out_stride,
    K: tl.constexpr, WEIGHED: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    narrow = rows.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        at = start + lane
        total = tl.zeros((BLOCK,), tl.float32)
        for k in range(K):
            row = tl.load(place + t * K + k)
            y = tl.load(rows + row * row_stride + at, mask=at < width, other=0.0).to(tl.float32)
            if WEIGHED:
                y = y * tl.load(weights + t * K + k).to(tl.float32)
            if ROUNDED:
                y = y.to(narrow).to(tl.float32)
            total += y
        tl.store(out + t * out_stride + at, total.to(narrow), mask=at < width)


def gather(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """See ``kernels.expert_rows.op.gather``."""
    _move(rows, index, out, back=False)


def scatter(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """See ``kernels.expert_rows.op.scatter``."""
    _move(rows, index, out, back=True)


def _move(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor, *, back: bool) -> None:
    _move_kernel[(len(index),)](
        rows, index, out, rows.shape[1], rows.stride(0), out.stride(0),
        BACK=back, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def weigh_(rows: torch.Tensor, weights: torch.Tensor) -> None:
    """See ``kernels.expert_rows.op.weigh_``."""
    _weigh_kernel[(len(rows),)](
        rows, weights, rows.shape[1], rows.stride(0), BLOCK=_BLOCK, num_warps=_WARPS
    )


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """See ``kernels.expert_rows.op.swiglu``; contiguous."""
    _swiglu_kernel[(len(gate),)](
        gate, up, gate, gate, out, gate, gate.shape[1], limit,
        BACK=False, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def swiglu_gradients_(
    gate: torch.Tensor,
    up: torch.Tensor,
    back: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
    dots: torch.Tensor,
) -> None:
    """See ``kernels.expert_rows.op.swiglu_gradients_``; contiguous."""
    _swiglu_kernel[(len(gate),)](
        gate, up, back, weights, back, dots, gate.shape[1], limit,
        BACK=True, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def sum_places(
    rows: torch.Tensor,
    place: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    *,
    rounded: bool,
) -> None:
    """See ``kernels.expert_rows.op.sum_places``."""
    place = place.contiguous()
    weights = None if weights is None else weights.contiguous()
    _sum_kernel[(len(place),)](
        rows, place, place if weights is None else weights, out,
        rows.shape[1], rows.stride(0), out.stride(0),
        K=place.shape[1], WEIGHED=weights is not None, ROUNDED=rounded,
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
