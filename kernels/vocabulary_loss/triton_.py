"""Statistics and gradients of a strip of logits in Triton: one program a row, one pass, CUDA only.

See ``op`` for what they mean. Each lane of a program keeps the largest logit it met and its own
sum, so that a row costs one exponential per element and a single reduction at its end. Whole blocks
of columns are read without a mask, which would keep reads from being wide at odd widths.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _met(y, largest, mass, weighted, ENTROPY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lanes' largest logit, mass and weighted sum with one more logit each."""
    absent = y == float("-inf")
    # One exponential serves both cases: it scales what was summed, or it is what is added.
    e = tl.where(absent, 0.0, tl.exp(-tl.abs(y - largest)))
    above = y > largest
    mass = tl.where(above, mass * e + 1.0, mass + e)
    if ENTROPY:
        finite = tl.where(absent, 0.0, y)
        weighted = tl.where(above, weighted * e + finite, weighted + e * finite)
    return tl.where(above, y, largest), mass, weighted


@triton.jit
def _fold_kernel(  # type: ignore[no-untyped-def]
    strip, columns, state, width, row_stride, rows, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = strip + row * row_stride
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        y = tl.load(begin + start + lane).to(tl.float32)
        largest, mass, weighted = _met(y, largest, mass, weighted, ENTROPY)
    if whole < width:
        at = whole + lane
        y = tl.load(begin + at, mask=at < width, other=float("-inf")).to(tl.float32)
        largest, mass, weighted = _met(y, largest, mass, weighted, ENTROPY)

    m_old = tl.load(state + row)
    m = tl.maximum(m_old, tl.max(largest, 0))
    shift = tl.where(m == float("-inf"), 0.0, m)
    # Lanes and states that met nothing have mass 0, or nan where all they met was nan.
    old_factor, factor = tl.exp(m_old - shift), tl.exp(largest - shift)
    at_mass = state + (row + rows)
    total = tl.sum(mass * factor, 0)
    tl.store(state + row, m)
    tl.store(at_mass, tl.load(at_mass) * old_factor + total)
    if ENTROPY:
        at_weighted = state + (row + 3 * rows)
        met = tl.sum(weighted * factor, 0)
        tl.store(at_weighted, tl.load(at_weighted) * old_factor + met)
    column = tl.load(columns + row)
    if column >= 0:
        y = tl.load(begin + column).to(tl.float32)
        at_target = state + (row + 2 * rows)
        tl.store(at_target, tl.load(at_target) + y)


@triton.jit
def _gradient(y, at, column, norm, factor):  # type: ignore[no-untyped-def]
    p = tl.exp(y.to(tl.float32) - norm)
    return tl.where(at == column, p - 1.0, p) * factor


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    strip, columns, lse, scale, width, row_stride, scale_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = strip + row * row_stride
    lane = tl.arange(0, BLOCK)
    norm = tl.load(lse + row)
    factor = tl.load(scale + row * scale_stride)
    column = tl.load(columns + row)
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        at = start + lane
        g = _gradient(tl.load(begin + at), at, column, norm, factor)
        tl.store(begin + at, g.to(strip.dtype.element_ty))
    if whole < width:
        at = whole + lane
        y = tl.load(begin + at, mask=at < width, other=float("-inf"))
        g = _gradient(y, at, column, norm, factor)
        tl.store(begin + at, g.to(strip.dtype.element_ty), mask=at < width)


def fold_strip(strip: torch.Tensor, columns: torch.Tensor, state: torch.Tensor) -> None:
    """See ``kernels.vocabulary_loss.op.fold_strip``; state in float32."""
    if strip.numel() == 0:
        return
    rows, width = strip.shape
    _fold_kernel[(rows,)](
        strip, columns, state, width, strip.stride(0), rows,
        ENTROPY=len(state) == 4, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def gradient_(
    strip: torch.Tensor, columns: torch.Tensor, lse: torch.Tensor, scale: torch.Tensor
) -> None:
    """See ``kernels.vocabulary_loss.op.gradient_``; lse and scale in float32."""
    if strip.numel() == 0:
        return
    rows, width = strip.shape
    _gradient_kernel[(rows,)](
        strip, columns, lse, scale, width, strip.stride(0), 0 if scale.numel() == 1 else 1,
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
