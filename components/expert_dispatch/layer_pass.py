"""One run over a layer's chunks, those before and after under way between ranks meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh

from components.expert_dispatch.last_product import ExpertRuns
from components.expert_dispatch.layer_plan import LayerPlan
from components.expert_dispatch.rows import ChunkRows
from components.expert_dispatch.travel import Homeward, Outward
from components.expert_dispatch.weights import Migration
from components.titan.experts import parts_of

Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Rows (T k, D) at home, places (T, k), weights (T, k), and where the tokens go, (T, D)."""

Computed = TypeVar("Computed")
Leaving = TypeVar("Leaving")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Surroundings:
    """What a layer's experts run with, the same in every pass."""

    experts: nn.Module
    """Of a kind that ``parts_of`` knows; parameters (experts, ...)."""

    combine: Combine

    rows_group: dist.ProcessGroup

    weights_group: dist.ProcessGroup
    """Of the same ranks."""

    beside: bool = True
    """Whether rows travel while the device computes; the results are the same."""

    rounded_sums: bool = False
    """Whether parameters' gradients are rounded to the parameter's dtype after each chunk; takes
    half the memory, and the time, of sums in full precision. One chunk is rounded once anyway."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Part:
    """Rows of a chunk that are computed with native weights, or with foreign ones."""

    runs: ExpertRuns

    rows: slice

    foreign: bool


class LayerPass:
    """The chunks of one run, with the weights of native and foreign experts at hand.

    Attributes:
        names: of the parameters.
        native: this rank's share of each.
    """

    def __init__(
        self,
        around: Surroundings,
        layer: LayerPlan,
        ids: torch.Tensor,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """
        Args:
            ids: experts of this rank's tokens, int64 (N, k).
            parameters: this rank's share of each.
        """
        self.around, self.layer, self._ids = around, layer, ids
        self.migration = Migration(layer.plan, layer.rank, around.weights_group)
        self.names = [name for name, _ in around.experts.named_parameters()]
        self.native = [parameter.detach() for parameter in parameters]
        # Foreign weights travel until the first foreign rows are computed.
        self._fetch = self.migration.fetch(self.native)
        self._parts = parts_of(around.experts)

    @property
    def foreign(self) -> list[torch.Tensor]:
        """Foreign experts' share of each parameter."""
        return self._fetch.wait()

    def finish_fetch(self) -> None:
        """Wait until whoever fetches this rank's weights has them, also where it fetches none
        itself: FSDP frees them as soon as the layer's pass is over."""
        self._fetch.wait()

    @property
    def foreign_like(self) -> list[torch.Tensor]:
        """What it is going to be: its shapes, dtypes and device, not its values."""
        return self._fetch.copies

    def tokens(self, index: int) -> slice:
        """Of a chunk."""
        return self.layer.partition.rows(index)

    def send(
        self, index: int, tensors: Sequence[torch.Tensor], weights: torch.Tensor | None
    ) -> tuple[ChunkRows, Outward]:
        """A chunk's tokens to where they are computed.

        Args:
            tensors: of all tokens of this rank, (N, D).
            weights: of all routes, (N, k); None: not sent.
        """
        tokens, around, layer = self.tokens(index), self.around, self.layer
        counts, ids = layer.counts[:, index], self._ids[tokens]
        moves = ChunkRows(layer.chunk(index), counts, ids, layer.rank, around.rows_group)
        mine = None if weights is None else weights[tokens]
        sent = [tensor[tokens] for tensor in tensors]
        return moves, Outward(moves, sent, mine, beside=around.beside)

    def send_home(self, moves: ChunkRows, parts: list[torch.Tensor]) -> Homeward:
        """What was computed of a chunk's rows, in parts; see ``Homeward``."""
        return Homeward(moves, parts, beside=self.around.beside)

    def parts(self, moves: ChunkRows) -> Iterator[Part]:
        """Native rows, then foreign ones: apart, so that native weights are not copied next to the
        foreign ones, nor waits what needs none of these."""
        cut = sum(moves.native_sizes)
        runs = self._runs(self.native, moves.native, moves.native_sizes)
        yield Part(runs=runs, rows=slice(0, cut), foreign=False)
        if self.migration.foreign:
            runs = self._runs(self.foreign, moves.foreign, moves.foreign_sizes)
            yield Part(runs=runs, rows=slice(cut, moves.computed), foreign=True)

    def _runs(
        self, weights: Sequence[torch.Tensor], ends: torch.Tensor, sizes: list[int]
    ) -> ExpertRuns:
        named = dict(zip(self.names, weights, strict=True))
        return ExpertRuns(parts=self._parts, weights=named, ends=ends, sizes=sizes)

    def in_turn(
        self,
        send: Callable[[int], tuple[ChunkRows, Outward]],
        compute: Callable[[int, ChunkRows, Outward], Computed],
        give: Callable[[int, ChunkRows, Computed], Leaving],
        land: Callable[[int, ChunkRows, Leaving], None],
        last: Callable[[], None] | None = None,
        *,
        backwards: bool = False,
    ) -> None:
        """Every chunk, the last one first if ``backwards``; all ranks make the same calls.

        While a chunk is computed, the next is on its way out and the one before on its way home.

        Args:
            send: a chunk's tokens.
            compute: what arrived.
            give: what was computed on its way home.
            land: what came home.
            last: called when the last chunk is on its way home.
        """
        turns = list(range(self.layer.partition.chunks))
        turns = turns[::-1] if backwards else turns
        coming: tuple[ChunkRows, Outward] | None = send(turns[0])
        leaving: list[tuple[int, ChunkRows, Leaving]] = []
        for turn, index in enumerate(turns):
            assert coming is not None
            moves, arriving = coming
            # Asked for before the computation, so that it need not be waited for.
            coming = send(turns[turn + 1]) if turn + 1 < len(turns) else None
            arriving.arrive()
            with maybe_set_sparse_mesh():
                computed = compute(index, moves, arriving)
            arriving.close()
            del arriving
            # Arrived during the computation; lands before the next sets out, so that one is held.
            while leaving:
                land(*leaving.pop())
            leaving.append((index, moves, give(index, moves, computed)))
            del computed, moves
        if last is not None:
            last()
        land(*leaving.pop())
