"""What the kernels are compiled for, and what they do not take."""

from dataclasses import dataclass

import torch

LOG2E = 1.4426950408889634
HEADS = 64
"""Heads of one thread block: the rows of a wgmma instruction."""
TILE = 64
"""Keys of one tile."""
WIDTHS = (256, 512)
TAILS = (0, 64)
SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Constants of a compiled kernel; queries, tokens and pools per query are free.

    Attributes:
        heads: heads of the queries.
        width: columns of the values, and of the keys without the tail.
        tail: further columns that only keys and queries have.
        size: tokens per pool.
        scale: factor on the logits.
    """

    heads: int
    width: int
    tail: int
    size: int
    scale: float


def check(
    q: torch.Tensor,
    latent: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    *,
    size: int,
    scale: float,
    tail: int,
) -> Shape:
    """The kernel's constants for these arguments.

    Raises:
        ValueError: a dtype, a device or a dimension that the kernels do not take.
    """
    if q.dim() != 3 or latent.dim() != 2 or pools.dim() != 2:
        raise ValueError(
            "sparse_mla wants q (Q, heads, d), latent (T, d) and pools (Q, n), got "
            f"{tuple(q.shape)}, {tuple(latent.shape)} and {tuple(pools.shape)}"
        )
    count, heads, columns = q.shape
    for name, found, wanted in (
        ("latent", latent.shape[1:], (columns,)),
        ("pools", pools.shape[:1], (count,)),
        ("position", position.shape, (count,)),
        ("start", start.shape, (count,)),
    ):
        if tuple(found) != wanted:
            raise ValueError(
                f"sparse_mla: {name} has {tuple(found)} where q {tuple(q.shape)} wants {wanted}"
            )
    if heads < 1 or heads % HEADS:
        raise ValueError(f"sparse_mla: heads={heads}, legal are multiples of {HEADS}")
    if tail not in TAILS:
        raise ValueError(f"sparse_mla: tail={tail}, legal are {TAILS}")
    if columns - tail not in WIDTHS:
        raise ValueError(
            f"sparse_mla: width={columns - tail} (q has {columns} columns, {tail} of them tail), "
            f"legal are {WIDTHS}"
        )
    if size not in SIZES:
        raise ValueError(f"sparse_mla: size={size} tokens per pool, legal are {SIZES}")
    if not scale > 0:
        raise ValueError(f"sparse_mla: scale={scale}, legal is a number above 0")
    if latent.shape[0] >= 2**31:
        raise ValueError(f"sparse_mla: latent has {latent.shape[0]} rows, legal are below 2^31")
    for name, tensor, dtype in (
        ("q", q, torch.bfloat16),
        ("latent", latent, torch.bfloat16),
        ("pools", pools, torch.int32),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"sparse_mla: {name} is {tensor.dtype}, legal is {dtype}")
    return Shape(heads=heads, width=columns - tail, tail=tail, size=size, scale=float(scale))
