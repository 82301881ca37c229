"""Selection of pools by a kernel, as a torch operation. Discrete, so without gradients."""

import torch

from kernels.backends.ops import INDEXER, IndexerKernels
from kernels.dsa.pooling import Pools


@torch.no_grad()
def select_pools(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    pools: Pools,
    position: torch.Tensor,
    lengths: tuple[int, ...],
    *,
    size: int,
    count: int,
    scale: float,
    begin: int = 0,
    backend: str,
) -> torch.Tensor:
    """See ``kernels.dsa.select.select_pools``: the same choice, made by a kernel.

    Args:
        backend: one of ``INDEXER.backends``.

    Raises:
        RuntimeError: the kernel failed to import, compile or launch.
    """
    width = min(count, max(lengths) // size)
    if width == 0:
        return queries.new_empty(len(queries), 0, dtype=torch.int32)
    first = pools.before[begin : begin + len(queries)]
    end = first + (position + 1) // size
    return _select(queries, weights, keys, first, end, width, scale, backend)


@torch.library.custom_op("kernels::select_pools", mutates_args=())
def _select(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    count: int,
    scale: float,
    backend: str,
) -> torch.Tensor:
    """int32 (Q, count)."""
    return run_select(queries, weights, keys, first, end, count, scale, backend)


def run_select(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    count: int,
    scale: float,
    backend: str,
) -> torch.Tensor:
    """The operation, on any device that the kernel runs on."""
    kernels: IndexerKernels = INDEXER.load(backend)
    select = INDEXER.guard(backend, kernels.select)
    return select(queries, weights, keys, first, end, count=count, scale=scale)


@_select.register_fake
def _(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    count: int,
    scale: float,
    backend: str,
) -> torch.Tensor:
    return queries.new_empty(len(queries), count, dtype=torch.int32)
