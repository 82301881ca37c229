"""From projected streams to the three maps in Triton, and back: a few numbers per token, CUDA only.

Sinkhorn's backward divides and multiplies by the sums of the forward turns, which are made again
and held in registers: nothing of the iteration is written to memory.
"""

import torch
import triton
import triton.language as tl

from kernels.hyper_connections.naive import Constants

_ROWS = 32
"""Tokens of one program."""


@triton.jit
def _logits(z, terms, row, mask, at, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Projected streams, factors and logits at places ``at`` of the rows."""
    y = tl.load(z + row * M + at, mask=mask, other=0.0)
    factor = tl.load(terms + at)
    return y, factor, y * factor + tl.load(terms + M + at)


@triton.jit
def _sigmoid(y):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-y))


@triton.jit
def _softmax(y):  # type: ignore[no-untyped-def]
    """Over the last axis of three."""
    e = tl.exp(y - tl.max(y, 2, keep_dims=True))
    return e / tl.sum(e, 2, keep_dims=True)


@triton.jit(do_not_specialize=["tokens", "iterations"])
def _maps_kernel(  # type: ignore[no-untyped-def]
    z, terms, pre, post, mix, tokens, eps, iterations,
    N: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, N)
    rows, mask = row[:, None], (row < tokens)[:, None]
    at = lane[None, :]
    _, _, y = _logits(z, terms, rows, mask, at, M)
    tl.store(pre + rows * N + at, _sigmoid(y) + eps, mask=mask)
    _, _, y = _logits(z, terms, rows, mask, N + at, M)
    tl.store(post + rows * N + at, 2.0 * _sigmoid(y), mask=mask)

    rows, mask = row[:, None, None], (row < tokens)[:, None, None]
    at = lane[None, :, None] * N + lane[None, None, :]
    _, _, y = _logits(z, terms, rows, mask, 2 * N + at, M)
    matrix = _softmax(y) + eps
    matrix = matrix / (tl.sum(matrix, 1, keep_dims=True) + eps)
    for _ in range(1, iterations):
        matrix = matrix / (tl.sum(matrix, 2, keep_dims=True) + eps)
        matrix = matrix / (tl.sum(matrix, 1, keep_dims=True) + eps)
    tl.store(mix + rows * (N * N) + at, matrix, mask=mask)


@triton.jit
def _sinkhorn_back(share, grad, eps, TURNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of the softmax's result ``share`` from that of the mixing matrix."""
    matrix = share + eps
    sums = ()
    for turn in tl.static_range(TURNS):
        total = tl.sum(matrix, 1 + turn % 2, keep_dims=True) + eps
        matrix = matrix / total
        sums = sums + (total,)  # type: ignore[assignment]
    for back in tl.static_range(TURNS):
        total = sums[TURNS - 1 - back]
        along = tl.sum(grad * matrix, 1 + (TURNS - 1 - back) % 2, keep_dims=True)
        grad = (grad - along) / total
        matrix = matrix * total
    return grad


@triton.jit
def _keep(dz, parts, rows, mask, at, d, y, factor, norm, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the gradients of some logits; their sums over tokens go to the terms' parts.

    Returns what one token's gradient of its norm has from them.
    """
    tl.store(dz + rows * M + at, d * factor * norm, mask=mask)
    here = parts + tl.program_id(0).to(tl.int64) * 2 * M + at
    tl.store(here, tl.sum(d * y, 0, keep_dims=True))
    tl.store(here + M, tl.sum(d, 0, keep_dims=True))
    return d * factor * y


@triton.jit(do_not_specialize=["tokens"])
def _maps_back_kernel(  # type: ignore[no-untyped-def]
    z, terms, norm, dpre, dpost, dmix, pre, dz, pull, parts, tokens, width, eps,
    TURNS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, N)
    inside = row < tokens
    rows, mask, at = row[:, None], inside[:, None], lane[None, :]
    scale = tl.load(norm + row, mask=inside, other=0.0)

    y, factor, logit = _logits(z, terms, rows, mask, at, M)
    s = _sigmoid(logit)
    tl.store(pre + rows * N + at, s + eps, mask=mask)
    d = tl.load(dpre + rows * N + at, mask=mask, other=0.0) * s * (1.0 - s)
    along = tl.sum(_keep(dz, parts, rows, mask, at, d, y, factor, scale[:, None], M), 1)

    y, factor, logit = _logits(z, terms, rows, mask, N + at, M)
    s = _sigmoid(logit)
    d = tl.load(dpost + rows * N + at, mask=mask, other=0.0) * 2.0 * s * (1.0 - s)
    along += tl.sum(_keep(dz, parts, rows, mask, N + at, d, y, factor, scale[:, None], M), 1)

    rows, mask = row[:, None, None], inside[:, None, None]
    at = lane[None, :, None] * N + lane[None, None, :]
    y, factor, logit = _logits(z, terms, rows, mask, 2 * N + at, M)
    share = _softmax(logit)
    d = tl.load(dmix + rows * (N * N) + at, mask=mask, other=0.0)
    d = _sinkhorn_back(share, d, eps, TURNS)
    d = share * (d - tl.sum(d * share, 2, keep_dims=True))
    kept = _keep(dz, parts, rows, mask, 2 * N + at, d, y, factor, scale[:, None, None], M)
    along += tl.sum(tl.sum(kept, 2), 1)
    tl.store(pull + row, along * scale * scale / width, mask=inside)


def maps(
    z: torch.Tensor, terms: torch.Tensor, n: int, constants: Constants
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``naive.maps``.

    Args:
        z: float32 (T, n^2 + 2n), contiguous, T >= 1.
        terms: float32 (2, n^2 + 2n), contiguous: factors, then what is added.
        n: streams, a power of two.
        constants: of the model.

    Returns:
        pre (T, n), post (T, n), mix (T, n, n), float32.
    """
    tokens, m = z.shape
    pre, post = z.new_empty(tokens, n), z.new_empty(tokens, n)
    mix = z.new_empty(tokens, n, n)
    _maps_kernel[(triton.cdiv(tokens, _ROWS),)](
        z, terms, pre, post, mix, tokens, constants.eps, constants.iterations,
        N=n, M=m, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return pre, post, mix


def gradients(
    dpre: torch.Tensor,
    dpost: torch.Tensor,
    dmix: torch.Tensor,
    z: torch.Tensor,
    norm: torch.Tensor,
    terms: torch.Tensor,
    width: int,
    constants: Constants,
) -> tuple[torch.Tensor, ...]:
    """Gradients of ``maps``, and what the projection's gradients need of them.

    Args:
        dpre, dpost: (T, n), dmix: (T, n, n): float32 and contiguous, as all of these.
        z: (T, n^2 + 2n).
        norm: (T,), the factor that ``z`` has been multiplied with.
        terms: (2, n^2 + 2n).
        width: n * D, of the vectors whose norm it is.
        constants: of the model.

    Returns:
        pre (T, n) once more; the gradient of what ``norm`` multiplied, (T, n^2 + 2n); the factor of
        the streams in their gradient through ``norm``, (T,); the gradient of ``terms``.
    """
    (tokens, m), n = z.shape, dpre.shape[1]
    programs = triton.cdiv(tokens, _ROWS)
    pre, dz, pull = torch.empty_like(dpre), torch.empty_like(z), torch.empty_like(norm)
    parts = z.new_empty(programs, 2, m)
    _maps_back_kernel[(programs,)](
        z, terms, norm, dpre, dpost, dmix, pre, dz, pull, parts, tokens, width, constants.eps,
        TURNS=2 * constants.iterations - 1, N=n, M=m, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return pre, dz, pull, parts.sum(0)
