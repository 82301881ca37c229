"""Sparse latent attention on Hopper: one thread block per query and 64 heads."""

import torch

from kernels.sparse_mla.compiler import check_device, compiled
from kernels.sparse_mla.plan import row_plan
from kernels.sparse_mla.shape import check
from kernels.sparse_mla.tuned import choice


def padded_pools(pools: torch.Tensor) -> torch.Tensor:
    """Contiguous, with a column of -1 where there is none: a kernel's buffer is not empty."""
    return pools.contiguous() if pools.shape[1] else pools.new_full((len(pools), 1), -1)


def forward(
    q: torch.Tensor,
    latent: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    *,
    size: int,
    scale: float,
    tail: int = 0,
    variant: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kernels.sparse_mla.naive.forward_reference``, on a Hopper GPU.

    Products of bfloat16 operands are summed in float32, probabilities are rounded to bfloat16
    before they meet the values. Nothing of a slot that is not used is read.

    Args:
        q: bfloat16 (Q, H, d + tail); H a multiple of 64, d 256 or 512, tail 0 or 64.
        latent: bfloat16 (T, d + tail).
        pools: int32 (Q, n), ascending, then -1; every id >= 0 is of a pool that exists.
        position: int (Q,), distance from the document's start; -1 for a query without keys.
        start: int (Q,), flat index of the document's first token; with ``position`` it may point
            anywhere in ``latent``, whatever part of the batch the queries are.
        size: tokens per pool: 1, 2, 4, 8 or 16.
        scale: factor on the logits, above 0.
        tail: columns that only queries and keys have.
        variant: ``split`` or ``simple`` instead of the tuned choice.

    Returns:
        bfloat16 (Q, H, d), and float32 (Q, H), natural logarithms of the sums of exponentials. A
        query without keys has zeros and -inf.

    Raises:
        ValueError: arguments that the kernels do not take.
        RuntimeError: no Hopper GPU, or the kernel does not compile.
    """
    shape = check(q, latent, pools, position, start, size=size, scale=scale, tail=tail)
    name, options = choice("forward", shape, variant)
    check_device(q)
    out = q.new_empty(*q.shape[:2], shape.width)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if q.shape[0] == 0:
        return out, lse
    with torch.cuda.device(q.device):
        plan = row_plan(pools, position, start, size)
        kernel = compiled(f"forward_{name}", shape, **options)
        kernel(q.contiguous(), latent.contiguous(), padded_pools(pools), plan, out, lse)
    return out, lse
