"""Choose pools by scores of operands in fp8, and count how many are those of full precision."""

from dataclasses import dataclass, replace

import torch
from torchtitan.protocols.module import Module

from components.models.glm_flash.documents import Documents
from components.models.glm_flash.indexer import IndexerInputs
from kernels.indexer import op
from kernels.indexer.fp8 import chosen_of, in_fp8
from kernels.indexer.windows import CAP_BYTES, TILE, Window, window_bytes


class Fp8Selector(Module):
    """``PoolSelector`` on rounded queries and keys; the choice itself stays exact and repeatable.

    Attributes:
        found, wanted: int64 scalars on the device since ``reset``, None before the first call: of
            the queries compared, pools that full precision chooses, and how many of them fp8 does.
            Queries that may choose all of their pools are left out.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inner: Module.Config
        """What chooses: of ``PoolSelector``, or of what takes its place."""
        count: int
        """Pools per query, at most."""
        kpool: int
        scale: float
        rotate: bool
        compared: int
        """Queries of a call that choose in full precision too."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.inner = config.inner.build()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.found: torch.Tensor | None = None
        self.wanted: torch.Tensor | None = None

    @torch.no_grad()
    def forward(self, inputs: IndexerInputs, documents: Documents, begin: int) -> torch.Tensor:
        """See ``PoolSelector.forward``."""
        operands = in_fp8(inputs.queries, inputs.weights, inputs.keys, self.config.rotate)
        chosen = self.inner(replace(inputs, **operands._asdict()), documents, begin)
        if len(chosen) and max(documents.lengths) // self.config.kpool > self.config.count:
            self._compare(inputs, chosen, documents, begin)
        return chosen

    def _compare(
        self, inputs: IndexerInputs, chosen: torch.Tensor, documents: Documents, begin: int
    ) -> None:
        """Evenly spaced queries, the last one among them: it may choose the most."""
        settings, total = self.config, len(chosen)
        step = -(-total // min(settings.compared, total))
        rows = torch.arange(total - 1, -1, -step, device=chosen.device)
        first = inputs.pools.before[rows + begin]
        end = first + (documents.position[rows] + 1) // settings.kpool
        queries, most = inputs.queries[rows], max(documents.lengths) // settings.kpool
        windows = _windows(len(rows), len(inputs.keys), most, settings.count)
        # At 1M tokens plain torch could take as long as fp8 saves.
        kernels = op.refusal(queries, settings.count) is None
        wanted = op.select(
            queries, inputs.weights[rows], inputs.keys, first.int(), end.int(), windows,
            count=settings.count, scale=settings.scale, backend="triton" if kernels else "torch",
        )  # fmt: skip
        wanted.masked_fill_((end - first <= settings.count).unsqueeze(1), -1)
        found, sought = chosen_of(chosen[rows], wanted), (wanted >= 0).sum()
        self.found = found if self.found is None else self.found + found
        self.wanted = sought if self.wanted is None else self.wanted + sought


def _windows(rows: int, pools: int, most: int, count: int) -> tuple[Window, ...]:
    """Rows that look at all pools, at a time as many as the cap of memory lets them be."""
    width = -(-pools // TILE) * TILE
    step = max(1, CAP_BYTES // window_bytes(1, width, count))
    return tuple(Window(q0, min(q0 + step, rows), 0, width, most) for q0 in range(0, rows, step))
