"""The choice of pools as a torch operator, in the kernels or in plain torch."""

import importlib.util
from typing import Literal

import torch

from kernels.backends.machine import ADA_ON, AMPERE_ON
from kernels.dsa.pooling import Pools
from kernels.indexer import fp8, naive
from kernels.indexer.windows import CAP_BYTES, Window, plan
from kernels.precision import accumulation_dtype

Backend = Literal["triton", "torch"]
DTYPES = (torch.bfloat16, torch.float16, fp8.FORMAT)
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
    gpus, least = (ADA_ON, "8.9") if queries.dtype == fp8.FORMAT else (AMPERE_ON, "8.0")
    if not gpus.take(torch.cuda.get_device_capability(queries.device)):
        return f"for {queries.dtype} they want a GPU of compute capability {least} or newer"
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
    key_factors: torch.Tensor | None = None,
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
        key_factors: float32 (P,) above 0, factors on the scores of each pool, which fp8 keys come
            with (``fp8.in_fp8``); None for keys of another dtype.

    Returns:
        int32 (Q, count): pools counted from ``first``, ascending, then -1.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a backend that cannot run them.
    """
    _check(queries, weights, keys, first, end, windows, count, scale)
    _check_factors(keys, key_factors)
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
    return _select(
        queries, weights, keys, first, end, flat, count, scale, cap_bytes, backend, key_factors
    )


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
    key_factors: torch.Tensor | None,
) -> torch.Tensor:
    fields = len(Window._fields)
    parts = tuple(Window(*windows[i : i + fields]) for i in range(0, len(windows), fields))
    if backend == "torch":
        return naive.select(
            queries, weights, keys, first, end, parts, count, scale, cap_bytes, key_factors
        )
    from kernels.indexer import walk

    return walk.select(
        walk.writer(queries.device), _aligned(queries), weights.contiguous(), _aligned(keys),
        first.contiguous(), end.contiguous(), parts, count, scale,
        None if key_factors is None else key_factors.contiguous(),
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
    key_factors: torch.Tensor | None,
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
    key_factors: torch.Tensor | None = None,
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
        count=width, scale=scale, cap_bytes=cap_bytes, backend=backend, key_factors=key_factors,
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


def _check_factors(keys: torch.Tensor, key_factors: torch.Tensor | None) -> None:
    if (keys.dtype == fp8.FORMAT) != (key_factors is not None):
        raise ValueError(
            f"key_factors: {'none' if key_factors is None else 'given'}, and keys are {keys.dtype};"
            f" legal: with {fp8.FORMAT} alone"
        )
    if key_factors is not None and (
        key_factors.shape != keys.shape[:1]
        or key_factors.dtype != torch.float32
        or key_factors.device != keys.device
    ):
        raise ValueError(
            f"key_factors: {key_factors.dtype} {tuple(key_factors.shape)} on {key_factors.device}; "
            f"legal: torch.float32 {tuple(keys.shape[:1])} on {keys.device}"
        )
