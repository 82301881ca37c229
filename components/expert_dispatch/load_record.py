"""What a step's plans did, as scalars of the run."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from components.expert_dispatch.layer_plan import LayerLoad

_GIB = 2**30

SCALARS = {
    "llep/rank_load": "rows of the fullest rank over the mean if every expert ran where it lives, "
    "worst layer and pass of the step",
    "llep/mean_rank_load": "the same, mean of layers and passes",
    "llep/planned_rank_load": "rows of the fullest rank over the mean as planned, worst layer and "
    "pass of the step",
    "llep/mean_planned_rank_load": "the same, mean of layers and passes",
    "llep/chunks": "chunks that a layer's tokens were cut into (K), most of the step",
    "llep/copied_gib": "weights of experts that ranks copied to each other in the step's forward "
    "passes, all ranks, GiB; backward copies them again and returns their gradients in float32",
    "llep/receive_peak_rows": "rows that a rank received in one chunk, those of its own tokens "
    "included, most of the step and ranks",
    "llep/receive_peak_gib": "these rows, GiB",
}

HEADLINES = {"llep/rank_load": "rank load", "llep/planned_rank_load": "planned"}


class LoadRecord:
    """The loads of one step on one rank. Numbers of the host alone."""

    def __init__(self) -> None:
        self._loads: list[LayerLoad] = []

    def add(self, loads: Iterable[LayerLoad | None]) -> None:
        """One pass: a load of every layer; None of one that has not run."""
        self._loads += [load for load in loads if load is not None]

    def scalars(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """The names of ``SCALARS``, over all ranks; nothing if no rank has a load.

        Args:
            group: of all ranks, for tensors on the CPU; None: one rank. All call it together.
        """
        loads = self._loads
        most, total = (
            [[getattr(load, name) for load in loads] or [0] for name in names]
            for names in (_MOST, _TOTAL)
        )
        mine = [*map(max, most), *map(sum, total), len(loads)]
        each = torch.tensor([mine], dtype=torch.float64)
        if group is not None:
            each = torch.empty(dist.get_world_size(group), len(mine), dtype=torch.float64)
            dist.all_gather_single(each.view(-1), torch.tensor(mine, dtype=torch.float64), group)
        before, after, chunks, rows, nbytes = each[:, : len(_MOST)].amax(0).tolist()
        sum_before, sum_after, copied, count = each[:, len(_MOST) :].sum(0).tolist()
        if not count:
            return {}
        return {
            "llep/rank_load": before,
            "llep/mean_rank_load": sum_before / count,
            "llep/planned_rank_load": after,
            "llep/mean_planned_rank_load": sum_after / count,
            "llep/chunks": chunks,
            "llep/copied_gib": copied / _GIB,
            "llep/receive_peak_rows": rows,
            "llep/receive_peak_gib": nbytes / _GIB,
        }


_MOST = ("before", "after", "chunks", "receive_peak", "receive_peak_bytes")
_TOTAL = ("before", "after", "copied_bytes")
