"""The choice of pools as a torch operator, in the kernels or in plain torch."""

import importlib.util
from typing import Literal

import torch

from kernels.backends.machine import AMPERE_ON
from kernels.dsa.pooling import Pools
from kernels.indexer import naive
from kernels.indexer.windows import CAP_BYTES, Window, plan
from kernels.precision import accumulation_dtype

Backend = Literal["triton", "torch"]
DTYPES = (torch.bfloat16, torch.float16)
HEADS = (8, 16, 32, 64)
DIMS = (64, 128)
MOST_CHOSEN = 2048
MOST_POOLS = 65534 * 16
"""Most pools of one query in the kernels: 4M tokens of 4 to a pool."""


def refusal(queries: torch.Tensor, count: int) -> str | None:
    """Why the kernels cannot choose for such queries, or None if they can.

    Args:
        queries: (Q, heads, d).
        count: pools to choose.
    """
    heads, dim = queries.shape[1:]
    if not queries.is_cuda:
        return f"they run on CUDA only, and queries are on {queries.device}"
    if not AMPERE_ON.take(torch.cuda.get_device_capability(queries.device)):
        return "they want a GPU of compute capability 8.0 or newer"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if queries.dtype not in DTYPES:
        return f"they take {' or '.join(map(str, DTYPES))}, and queries are {queries.dtype}"
    if heads not in HEADS:
        return f"they take {', '.join(map(str, HEADS))} heads, and queries have {heads}"
    if dim not in DIMS:
        return f"they take a head width d of {' or '.join(map(str, DIMS))}, and it is {dim}"
    if count > MOST_CHOSEN:
        return f"they choose up to {MOST_CHOSEN} pools, and {count} are wanted"
    return None


@torch.no_grad()
def select(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    windows: tuple[Window, ...],
    *,
    count: int,
    scale: float,
    cap_bytes: int = CAP_BYTES,
    backend: Backend = "triton",
) -> torch.Tensor:
    """Choose the ``count`` best pools of each query's range; ties go to the lowest pool.

    Scores are ``sum_h w_h relu(<q_h, key>) * scale`` with float32 accumulation. The choice is exact
    given the scores and the same in every run, whatever the windows are. Scores of the two backends
    differ by rounding, so that pools of nearly equal score may change places. Not differentiable.
    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1, over pools instead of tokens.

    Args:
        queries: (Q, heads, d).
        weights: (Q, heads) in ``accumulation_dtype``; signed.
        keys: (P, d), the dtype of ``queries``.
        first, end: int32 (Q,), each query may choose the pools from ``first`` up to ``end`` - 1.
        windows: of all queries in order; each query's range lies inside its window.
        count: pools to choose, >= 1. A query with fewer gets all of them.
        scale: factor on every product of query and key, above 0.
        cap_bytes: of plain torch's products of one window; ``plan`` caps the kernels' memory.
        backend: "triton" for the kernels, "torch" for the definition.

    Returns:
        int32 (Q, count): pools counted from ``first``, ascending, then -1.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a backend that cannot run them.
    """
    _check(queries, weights, keys, first, end, windows, count, scale)
    if backend == "triton":
        reason = refusal(queries, count)
        widest = max((window.widest for window in windows), default=0)
        if reason is None and widest > MOST_POOLS:
            reason = f"they take up to {MOST_POOLS} pools to a query, and one has {widest}"
        if reason is not None:
            raise ValueError(
                f"backend: 'triton' cannot run the indexer: {reason}; legal here: 'torch'"
            )
    elif backend != "torch":
        raise ValueError(f"backend: {backend!r}; legal: 'triton', 'torch'")
    flat = [number for window in windows for number in window]
    return _select(queries, weights, keys, first, end, flat, count, scale, cap_bytes, backend)


@torch.library.custom_op("indexer::select", mutates_args=())
def _select(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    windows: list[int],
    count: int,
    scale: float,
    cap_bytes: int,
    backend: str,
) -> torch.Tensor:
    fields = len(Window._fields)
    parts = tuple(Window(*windows[i : i + fields]) for i in range(0, len(windows), fields))
    if backend == "torch":
        return naive.select(queries, weights, keys, first, end, parts, count, scale, cap_bytes)
    from kernels.indexer import walk

    return walk.select(
        walk.writer(queries.device), _aligned(queries), weights.contiguous(), _aligned(keys),
        first.contiguous(), end.contiguous(), parts, count, scale,
    )  # fmt: skip


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous, from an address that bulk copies can begin at: a multiple of 16 bytes."""
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


@_select.register_fake
def _(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    windows: list[int],
    count: int,
    scale: float,
    cap_bytes: int,
    backend: str,
) -> torch.Tensor:
    return first.new_empty((queries.shape[0], count))


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
    cap_bytes: int = CAP_BYTES,
    backend: Backend = "triton",
) -> torch.Tensor:
    """Choose the ``count`` best complete pools of each query's document.

    As ``kernels.dsa.select.select_pools``, with the same arguments and result; memory is the
    inputs, the result and ``cap_bytes``.
    """
    width = min(count, max(lengths) // size)
    if width == 0:
        return queries.new_empty((len(queries), 0), dtype=torch.int32)
    stop = begin + len(queries)
    first = pools.before[begin:stop]
    end = first + (position + 1) // size
    windows = plan(lengths, size, count=width, cap_bytes=cap_bytes, begin=begin, stop=stop)
    return select(
        queries, weights, keys, first.int(), end.int(), windows,
        count=width, scale=scale, cap_bytes=cap_bytes, backend=backend,
    )  # fmt: skip


def _check(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor,
    first: torch.Tensor, end: torch.Tensor, windows: tuple[Window, ...], count: int, scale: float,
) -> None:  # fmt: skip
    rows, heads, dim = queries.shape
    wide = accumulation_dtype(queries.dtype)
    for name, value, shape, dtype in (
        ("weights", weights, (rows, heads), wide),
        ("keys", keys, (len(keys), dim), queries.dtype),
        ("first", first, (rows,), torch.int32),
        ("end", end, (rows,), torch.int32),
    ):
        if value.shape != shape or value.dtype != dtype or value.device != queries.device:
            raise ValueError(
                f"{name}: {value.dtype} {tuple(value.shape)} on {value.device}; legal: {dtype} "
                f"{tuple(shape)} on {queries.device}"
            )
    if count < 1 or not scale > 0:
        raise ValueError(f"count: {count}, scale: {scale}; legal: count >= 1, scale > 0")
    ends = [0, *(window.q1 for window in windows)]
    if [window.q0 for window in windows] != ends[:-1] or ends[-1] != rows:
        raise ValueError(f"windows: they do not cover {rows} queries one after the other")
