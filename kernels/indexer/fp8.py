"""An indexer's operands in fp8: half the bytes, and twice the rate of the tensor cores.

Each row, a query's head or a key, is divided by a power of two of its own, so that the division
rounds nothing and only the eight bits do. Rows may be turned first by a Hadamard matrix, which
changes no product of two rows but spreads what stands out in few channels over all of them.
Source: DeepSeek-V3.2's inference code (rotated activations, e4m3 with a factor per row of 128).
"""

from typing import NamedTuple

import torch

from kernels.row_blocks import row_blocks

FORMAT = torch.float8_e4m3fn
SMALLEST = 2.0**-100
"""What the largest number of a row counts as, at least: a row of zeros is divided by something."""


class Rows(NamedTuple):
    """``values * factors.unsqueeze(-1)`` are the rows, rounded.

    Attributes:
        values: ``FORMAT`` (..., d).
        factors: float32 (...), powers of two; nan for a row that is not finite, as all its values.
    """

    values: torch.Tensor
    factors: torch.Tensor


class Operands(NamedTuple):
    """What ``op.select_pools`` takes in place of queries, weights and keys of another dtype."""

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    key_factors: torch.Tensor


def hadamard(d: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Sylvester's matrix of 1 and -1: float32 (d, d), symmetric, its square is d times identity.

    Raises:
        ValueError: d is not a power of two.
    """
    if d < 1 or d & (d - 1):
        raise ValueError(f"rotate: rows of {d} channels cannot be turned; legal: powers of two")
    turn = torch.ones(1, 1, device=device)
    while len(turn) < d:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    return turn


def round_rows_reference(x: torch.Tensor, rotate: bool) -> Rows:
    """The definition. See ``round_rows``."""
    rows = x.flatten(0, -2)
    values = torch.empty(rows.shape, dtype=FORMAT, device=x.device)
    factors = torch.empty(len(rows), device=x.device)
    turn = hadamard(x.shape[-1], x.device) if rotate else None
    for block in row_blocks(*rows.shape):
        wide = rows[block].float()
        wide = wide if turn is None else wide @ turn
        largest = wide.abs().amax(1)
        # The least power of two that is no less than largest / 448, where 448 is 0.875 x 2^9.
        m, e = torch.frexp(largest.clamp(min=SMALLEST))
        factor = torch.ldexp(torch.ones_like(m), e - 9 + (m > 0.875).int())
        factors[block] = factor.masked_fill(~largest.isfinite(), float("nan"))
        values[block] = (wide / factors[block].unsqueeze(1)).to(FORMAT)
    return Rows(values.view(x.shape), factors.view(x.shape[:-1]))


def round_rows(x: torch.Tensor, rotate: bool) -> Rows:
    """Round the last dimension's rows to fp8, in a kernel on CUDA.

    Args:
        x: (..., d), bfloat16, float16 or float32.
        rotate: the result is ``x @ hadamard(d)``, of which products are d times too large.

    Raises:
        ValueError: ``rotate``, and d is not a power of two.
    """
    if x.is_cuda and x.dtype != torch.float32:
        from kernels.indexer import triton_fp8

        return triton_fp8.round_rows(x.contiguous(), rotate)
    return round_rows_reference(x, rotate)


@torch.no_grad()
def in_fp8(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rotate: bool
) -> Operands:
    """Round queries and keys. Scores are the same but for that rounding.

    Factors of queries go into their weights, as they are above zero and may follow the relu.

    Args:
        queries: (Q, heads, d).
        weights: float32 (Q, heads).
        keys: (P, d).
        rotate: turn both by a Hadamard matrix first; d is a power of two.
    """
    q, k = round_rows(queries, rotate), round_rows(keys, rotate)
    shrink = 1 / queries.shape[-1] if rotate else 1.0
    return Operands(q.values, weights * q.factors, k.values, k.factors * shrink)


def chosen_of(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How many of the pools in ``wanted`` are in ``found``, in all.

    Args:
        found, wanted: int32 (Q, n), in a row ascending and distinct, then -1.

    Returns:
        int64 scalar on their device.
    """
    if wanted.shape[1] == 0:
        return wanted.new_zeros((), dtype=torch.int64)
    # Behind the last one: as large as can be, so that rows ascend to their end.
    ordered = found.masked_fill(found < 0, torch.iinfo(torch.int32).max)
    place = torch.searchsorted(ordered, wanted.contiguous()).clamp(max=found.shape[1] - 1)
    return (ordered.gather(1, place) == wanted).sum()  # -1 is in no row of these
