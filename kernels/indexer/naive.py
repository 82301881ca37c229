"""The choice of pools in plain torch: the definition that the kernels are tested against."""

import torch

from kernels.dsa.select import best_pools, compact, pool_scores
from kernels.indexer.windows import Window
from kernels.precision import accumulation_dtype


def select(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    windows: tuple[Window, ...],
    count: int,
    scale: float,
    cap_bytes: int,
    key_factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``kernels.indexer.op.select``; any float dtype, any device, any heads and d.

    Scores are ``sum_h w_h relu(<q_h, key> * scale)`` with operands upcast to
    ``accumulation_dtype``; of equal scores the lowest pool is chosen. Beside the cap it holds
    ``keys`` upcast. ``weights`` is in ``accumulation_dtype``.
    """
    keys = keys.to(accumulation_dtype(keys.dtype))
    chosen = first.new_full((len(queries), count), -1)
    for window in windows:
        if window.width == 0:
            continue
        # Beside the heads' products: ranks and counts of the selection.
        row_bytes = window.width * (keys.itemsize * queries.shape[1] + 24)
        step = max(1, cap_bytes // row_bytes)
        for q0 in range(window.q0, window.q1, step):
            rows = slice(q0, min(q0 + step, window.q1))
            pools = keys[window.p0 : window.p0 + window.width]
            column = torch.arange(window.p0, window.p0 + len(pools), device=keys.device)
            allowed = (column >= first[rows, None]) & (column < end[rows, None])
            scores = pool_scores(queries[rows], weights[rows], pools, scale)
            if key_factors is not None:
                scores *= key_factors[window.p0 : window.p0 + len(pools)]
            found = best_pools(scores, allowed, count)
            chosen[rows] = compact(found, first[rows] - window.p0, count)
    return chosen
