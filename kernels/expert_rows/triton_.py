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
    other, rows, weights, dots, width, other_stride, row_stride,
    DOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + i).to(tl.float32)
    begin = rows + i * row_stride
    lane = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lane
        y = tl.load(begin + at, mask=at < width, other=0.0).to(tl.float32)
        if DOT:
            x = tl.load(other + i * other_stride + at, mask=at < width, other=0.0)
            products += x.to(tl.float32) * y
        tl.store(begin + at, (y * weight).to(rows.dtype.element_ty), mask=at < width)
    if DOT:
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
                total = (total + y.to(narrow).to(tl.float32)).to(narrow).to(tl.float32)
            else:
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
        rows, rows, weights, weights, rows.shape[1], rows.stride(0), rows.stride(0),
        DOT=False, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def dot_and_weigh_(
    other: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, dots: torch.Tensor
) -> None:
    """See ``kernels.expert_rows.op.dot_and_weigh_``."""
    _weigh_kernel[(len(rows),)](
        other, rows, weights, dots, rows.shape[1], other.stride(0), rows.stride(0),
        DOT=True, BLOCK=_BLOCK, num_warps=_WARPS,
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
