"""The short convolution in plain torch, in blocks of tokens.

Kept for backward: the input in its own dtype, and the weight. Beyond that, forward and backward
hold a few float32 copies of one block at a time.
"""

from typing import Any

import torch

from kernels.packed import check_lengths
from kernels.precision import accumulation_dtype

BLOCK = 2048
"""Tokens that are computed together."""


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, position)
        out = x.new_empty(x.shape)
        for start in range(0, len(x), BLOCK):
            stop = min(start + BLOCK, len(x))
            sums = _convolve(x, weight, position, start, stop)
            out[start:stop] = sums.mul_(torch.sigmoid(sums))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, position = ctx.saved_tensors
        reach = weight.shape[-1] - 1
        taps = weight.to(accumulation_dtype(x.dtype))
        grad_x, grad_weight = x.new_empty(x.shape), torch.zeros_like(taps)
        for start in range(0, len(x), BLOCK):
            stop = min(start + BLOCK, len(x))
            # Tokens of the next block look back into this one.
            far = min(stop + reach, len(x))
            to_sums = _sums_gradient(x, weight, position, grad_out, start, far)
            to_x = taps[:, 0, reach] * to_sums[: stop - start]
            for back in range(reach + 1):
                own = to_sums[: stop - start] * _seen(x, position, start, stop, back)
                grad_weight[:, 0, reach - back] += own.sum(0)
            for back in range(1, reach + 1):
                later = to_sums[back : stop - start + back]
                looked = position[start + back : start + back + len(later), None] >= back
                to_x[: len(later)] += (taps[:, 0, reach - back] * later).masked_fill_(~looked, 0)
            grad_x[start:stop] = to_x
        return grad_x, grad_weight.to(weight.dtype), None


def _seen(
    x: torch.Tensor, position: torch.Tensor, start: int, stop: int, back: int
) -> torch.Tensor:
    """What the tokens ``start`` to ``stop`` - 1 see ``back`` tokens before them, (tokens, C)."""
    rows = x.new_zeros(stop - start, x.shape[1], dtype=accumulation_dtype(x.dtype))
    first = max(start, back)
    if first < stop:
        rows[first - start :] = x[first - back : stop - back]
    return rows.masked_fill_((position[start:stop] < back).unsqueeze(1), 0)


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, position: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """The sums before the SiLU of the tokens ``start`` to ``stop`` - 1, in full precision."""
    reach = weight.shape[-1] - 1
    taps = weight.to(accumulation_dtype(x.dtype))
    sums = taps[:, 0, reach] * x[start:stop]
    for back in range(1, reach + 1):
        sums += taps[:, 0, reach - back] * _seen(x, position, start, stop, back)
    return sums


def _sums_gradient(
    x: torch.Tensor,
    weight: torch.Tensor,
    position: torch.Tensor,
    grad_out: torch.Tensor,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Gradient of ``_convolve``'s result through the SiLU."""
    sums = _convolve(x, weight, position, start, stop)
    sigmoid = torch.sigmoid(sums)
    return sums.mul_(1 - sigmoid).add_(1).mul_(sigmoid).mul_(grad_out[start:stop])


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, position: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    """silu(sum_r weight[c, 0, r] x[t - (K - 1) + r, c]), nothing read from before the document.

    Arithmetic is float32, or float64 where x is.

    Args:
        x: (T, C), any float dtype.
        weight: (C, 1, K); tap K - 1 meets the token itself.
        position: int64 (T,), distance from the document's first token: a token sees that many
            tokens before it, and K - 1 at most.
        lengths: tokens of each document, T in all.

    Returns:
        (T, C) in x's dtype.

    Raises:
        ValueError: shapes or lengths do not fit.
    """
    check_arguments(x, weight, position, lengths)
    return _ShortConv.apply(x, weight, position)


def check_arguments(
    x: torch.Tensor, weight: torch.Tensor, position: torch.Tensor, lengths: tuple[int, ...]
) -> None:
    """Raise ValueError, which names what does not fit, unless the arguments fit together."""
    tokens, channels = x.shape
    if weight.ndim != 3 or weight.shape[:2] != (channels, 1):
        raise ValueError(
            f"weight: shape {tuple(weight.shape)}; legal beside x of {tuple(x.shape)}: "
            f"({channels}, 1, K)"
        )
    if position.shape != (tokens,):
        raise ValueError(
            f"position: shape {tuple(position.shape)}; legal beside x of {tuple(x.shape)}: "
            f"({tokens},)"
        )
    check_lengths(lengths, tokens)
