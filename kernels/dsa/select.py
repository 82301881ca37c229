"""Choose, for every query, the best-scoring pools of its document: exact and repeatable."""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.dsa.pooling import Pools
from kernels.packed import bounds
from kernels.precision import accumulation_dtype

_SCORE_BYTES = 256 * 2**20
_MAX_QUERIES = 1024


def pool_scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: float
) -> torch.Tensor:
    """``sum_h w_h relu(<q_h, key> * scale)`` in full precision. Not differentiable.

    Args:
        queries: (Q, heads, d).
        weights: (Q, heads) in ``accumulation_dtype``; signed.
        keys: (P, d).
        scale: factor on every product of query and key.

    Returns:
        (Q, P) in ``accumulation_dtype``.
    """
    wide = accumulation_dtype(queries.dtype)
    heads = queries.flatten(0, 1).to(wide) @ keys.to(wide).t()
    heads = heads.mul_(scale).relu_().view(*queries.shape[:2], -1)
    return heads.mul_(weights.unsqueeze(-1)).sum(1)


def best_pools(scores: torch.Tensor, allowed: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` highest scores of each row among the allowed; ties go to the lowest column.

    Args:
        scores: (Q, P), finite.
        allowed: bool (Q, P).
        count: >= 1. A row with fewer allowed columns gets all of them.

    Returns:
        bool (Q, P).
    """
    if scores.shape[1] <= count:
        return allowed
    scores = scores.masked_fill(~allowed, float("-inf"))
    # topk's values do not depend on how it breaks ties; its indices would.
    least = scores.topk(count, dim=1).values[:, -1:]
    above = scores > least
    missing = count - above.sum(1, keepdim=True)
    ties = (scores == least) & allowed
    return above | (ties & (ties.cumsum(1) <= missing))


def compact(chosen: torch.Tensor, first_column: torch.Tensor, width: int) -> torch.Tensor:
    """Chosen columns as ascending numbers counted from ``first_column``, -1 after the last.

    Args:
        chosen: bool (Q, P), at most ``width`` in a row.
        first_column: integers (Q,).
        width: columns of the result.

    Returns:
        int32 (Q, width).
    """
    rank = chosen.cumsum(1) - 1
    columns = torch.arange(chosen.shape[1], device=chosen.device) - first_column.unsqueeze(1)
    ids = chosen.new_full((chosen.shape[0], width + 1), -1, dtype=torch.int32)
    # What is not chosen is written to a column that is cut off.
    ids.scatter_(1, torch.where(chosen, rank, width), columns.int())
    return ids[:, :width]


class Window(NamedTuple):
    """Queries ``q0:q1`` and pools ``p0:p1`` (numbered through the batch) that they may choose."""

    q0: int
    q1: int
    p0: int
    p1: int


def bytes_per_pair(heads: int) -> int:
    """Memory of ``select_pools`` per query and pool: the heads' products; ranks and counts of the
    selection, up to 24 bytes."""
    return 4 * heads + 24


def windows(
    lengths: tuple[int, ...],
    size: int,
    bytes_per_pair: int,
    begin: int = 0,
    stop: int | None = None,
) -> Iterator[Window]:
    """Cut queries into windows whose pairs of query and pool stay within a budget of memory.

    Args:
        lengths: tokens of the documents.
        size: tokens per pool.
        bytes_per_pair: memory per query and pool.
        begin, stop: which queries, by default all.
    """
    begins = bounds(lengths)
    earlier = bounds(tuple(length // size for length in lengths))

    def before(token: int) -> tuple[int, int]:
        """Pools of the documents before the token's, and those up to and including the token."""
        document = bisect.bisect_right(begins, token) - 1
        base = earlier[document]
        return base, base + (token + 1 - begins[document]) // size

    total = begins[-1] if stop is None else stop
    while begin < total:
        first_pool = before(begin)[0]
        end = min(total, begin + _MAX_QUERIES)
        pairs = max(1, before(end - 1)[1] - first_pool)
        # Fewer queries see no more pools, so what fits now fits then.
        end = min(end, begin + max(1, _SCORE_BYTES // (bytes_per_pair * pairs)))
        last_pool = before(end - 1)[1]
        yield Window(begin, end, first_pool, last_pool)
        begin = end


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
    key_factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose the ``count`` best complete pools of each query's document.

    A pool is open to a query once its last token is no later than the query. Memory: one window of
    scores, (queries x heads x pools), about 256 MiB whatever T is, and ``keys`` in full precision.
    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1, over pools instead of tokens.

    Args:
        queries: (Q, heads, d), of consecutive tokens, by default of all.
        weights: (Q, heads) float32, signed.
        keys: (P, d) of all pools, numbered as ``pools``.
        pools: which tokens and documents they belong to.
        position: int64 (Q,), distance from the start of the document.
        lengths: tokens of the documents.
        size: tokens per pool.
        count: pools to choose, >= 1.
        scale: factor on every product of query and key.
        begin: the first query's token, in the batch.
        key_factors: float32 (P,) above 0, factors on the scores of each pool; None: all 1.

    Returns:
        int32 (Q, min(count, most pools of any document)): pools numbered from their document's
        start, ascending, then -1.
    """
    width = min(count, max(lengths) // size)
    chosen = queries.new_full((queries.shape[0], width), -1, dtype=torch.int32)
    if width == 0:
        return chosen
    keys = keys.to(accumulation_dtype(keys.dtype))
    per_pair = bytes_per_pair(queries.shape[1])
    for q0, q1, p0, p1 in windows(lengths, size, per_pair, begin, begin + len(queries)):
        if p1 == p0:
            continue
        rows = slice(q0 - begin, q1 - begin)
        first = pools.before[q0:q1] - p0
        open_until = first + (position[rows] + 1) // size
        column = torch.arange(p1 - p0, device=queries.device)
        allowed = (column >= first.unsqueeze(1)) & (column < open_until.unsqueeze(1))
        scores = pool_scores(queries[rows], weights[rows], keys[p0:p1], scale)
        if key_factors is not None:
            scores *= key_factors[p0:p1]
        chosen[rows] = compact(best_pools(scores, allowed, count), first, width)
    return chosen
