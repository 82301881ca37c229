"""Routed experts whose rows are spread over the ranks by a plan, a chunk of the tokens at a time.

One function of autograd around everything: rows to the ranks that compute them, the products over
native and foreign experts, rows home. So every rank enters its backward, whatever it computed, and
nothing but tokens, weights and ids is kept. Backward fetches the foreign weights again, runs each
chunk once more, lets its graph go before the next begins, and sends the gradients of foreign
weights home once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh

from components.expert_dispatch.layer_plan import LayerPlan
from components.expert_dispatch.rows import ChunkRows
from components.expert_dispatch.weights import Migration
from components.recompute.tape import output
from kernels.precision import accumulation_dtype

Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows (T k, D) at home, places (T, k), weights (T, k), tokens (T, D) -> (T, D)."""

_Weights = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Surroundings:
    """What a layer's experts run with, the same in every pass."""

    experts: nn.Module
    """Rows sorted by expert (R, D) and counts (experts,) -> (R, D). Its parameters, each
    (experts, ...), may be exchanged for those of other experts, and of another number of them."""

    combine: Combine

    rows_group: dist.ProcessGroup

    weights_group: dist.ProcessGroup
    """Of the same ranks."""


def run_balanced(
    around: Surroundings,
    layer: LayerPlan,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """The experts of all tokens. All ranks of the group call it, also without any token.

    Gradients of tokens are summed over a token's routes in full precision. Those of parameters are
    summed over chunks and over ranks that computed an expert in full precision, from parts in the
    parameter's dtype, and are returned once.

    Args:
        layer: of the routes of all ranks.
        x: tokens (T, D).
        weights: (T, k).
        ids: experts, int64 (T, k).

    Returns:
        (T, D).
    """
    return _Balanced.apply(around, layer, x, weights, ids, *_parameters(around.experts))


def _parameters(experts: nn.Module) -> _Weights:
    """This rank's share of them, as plain tensors."""
    parameters = experts.parameters()
    return [p.to_local() if isinstance(p, DTensor) else p for p in parameters]


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        around: Surroundings,
        layer: LayerPlan,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        # In a layer's second run it comes from the tape, and no rank runs anything.
        out = output(lambda: _Pass(around, layer, ids, parameters).forward(x, weights))
        ctx.save_for_backward(x, weights, ids)
        ctx.around, ctx.layer = around, layer
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, ids = ctx.saved_tensors
        _, _, of_x, of_weights, _, *wanted = ctx.needs_input_grad
        # As they are now: FSDP may have freed and gathered them since.
        parameters = [p.detach() for p in _parameters(ctx.around.experts)]
        run = _Pass(ctx.around, ctx.layer, ids, parameters)
        grads = _Gradients(x if of_x else None, weights if of_weights else None, wanted, run)
        for index in range(len(run.layer.chunks)):
            grads.add(run.chunk(index), x, weights, grad_out)
        return None, None, grads.of_x, grads.of_weights, None, *grads.of_parameters()


class _Pass:
    """One run over all chunks, with the weights of native and foreign experts at hand."""

    def __init__(
        self,
        around: Surroundings,
        layer: LayerPlan,
        ids: torch.Tensor,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self.around, self.layer, self._ids = around, layer, ids
        self.migration = Migration(layer.plan, layer.rank, around.weights_group)
        self.native = [parameter.detach() for parameter in parameters]
        self.foreign = self.migration.fetch(self.native)
        self._names = [name for name, _ in around.experts.named_parameters()]

    def chunk(self, index: int) -> "_Chunk":
        layer = self.layer
        rows, counts = layer.partition.rows(index), layer.counts[:, index]
        group = self.around.rows_group
        moves = ChunkRows(layer.chunks[index], counts, self._ids[rows], layer.rank, group)
        return _Chunk(rows, moves)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for index in range(len(self.layer.chunks)):
            self._forward(self.chunk(index), x, weights, out)
        return out

    def _forward(
        self, chunk: "_Chunk", x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One chunk into its rows of ``out``. A function, so that nothing else is left of it."""
        computed = self.experts(chunk, chunk.moves.dispatch(x[chunk.rows]))
        at_home = chunk.moves.home(computed)
        del computed
        out[chunk.rows] = self.combine(chunk, at_home, weights[chunk.rows], x[chunk.rows])

    def experts(
        self,
        chunk: "_Chunk",
        rows: torch.Tensor,
        native: _Weights | None = None,
        foreign: _Weights | None = None,
    ) -> torch.Tensor:
        """Rows where they are computed (R, D) -> (R, D); the weights may be leaves of a graph."""
        moves = chunk.moves
        native, foreign = native or self.native, foreign or self.foreign
        if not self.migration.foreign:
            return self._apply(native, rows, moves.native)
        own, others = rows.split([moves.native_rows, len(rows) - moves.native_rows])
        # Apart, so that native weights are not copied next to the foreign ones.
        parts = self._apply(native, own, moves.native), self._apply(foreign, others, moves.foreign)
        return torch.cat(parts)

    def _apply(self, weights: _Weights, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self._names, weights, strict=True))
        with maybe_set_sparse_mesh():
            return functional_call(self.around.experts, named, (rows, counts))

    def combine(
        self, chunk: "_Chunk", at_home: torch.Tensor, weights: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        moves = chunk.moves
        return self.around.combine(at_home, moves.place, weights.gather(1, moves.choice), x)


@dataclass(frozen=True, eq=False, slots=True)
class _Chunk:
    rows: slice
    """Its tokens."""

    moves: ChunkRows


class _Gradients:
    """The gradients of one backward, as far as the chunks have come.

    Attributes:
        of_x, of_weights: None where not wanted.
    """

    def __init__(
        self,
        x: torch.Tensor | None,
        weights: torch.Tensor | None,
        wanted: Sequence[bool],
        run: _Pass,
    ) -> None:
        """
        Args:
            x, weights: None where their gradients are not wanted.
            wanted: by parameter.
        """
        # Every row is one chunk's: plain assignment, no sum.
        self.of_x = None if x is None else torch.empty_like(x)
        self.of_weights = None if weights is None else torch.empty_like(weights)
        self._run, self._wanted = run, wanted
        single = len(run.layer.chunks) == 1
        self._native = [_Sum(single) for wish in wanted if wish]
        self._foreign = [_Sum(single) for wish in wanted if wish]

    def add(
        self, chunk: _Chunk, x: torch.Tensor, weights: torch.Tensor, grad_out: torch.Tensor
    ) -> None:
        """Run a chunk and differentiate it; nothing of it is left but its gradients."""
        run, moves, rows = self._run, chunk.moves, chunk.rows
        arrived = moves.dispatch(x[rows]).requires_grad_(self.of_x is not None)
        native, foreign = self._leaves(run.native), self._leaves(run.foreign)
        with torch.enable_grad():
            computed = run.experts(chunk, arrived, native, foreign)
        pull = self._pull(chunk, moves.home(computed.detach()), x, weights, grad_out)
        # A rank that computes no row has its part in the exchange all the same.
        found = iter(self._differentiate(computed, moves.out(pull), arrived, native, foreign))
        if self.of_x is not None:
            of_rows = next(found)
            assert of_rows is not None
            self.of_x[rows] = moves.sum_routes(moves.home(of_rows))
        for total in self._native:
            total.add(next(found))
        if run.migration.foreign:
            for total in self._foreign:
                total.add(next(found))

    def _leaves(self, weights: _Weights) -> _Weights:
        return [
            weight.detach().requires_grad_(wish)
            for weight, wish in zip(weights, self._wanted, strict=True)
        ]

    def _pull(
        self,
        chunk: _Chunk,
        at_home: torch.Tensor,
        x: torch.Tensor,
        weights: torch.Tensor,
        grad_out: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of the experts' outputs, in home order; puts that of the weights away."""
        leaf = weights[chunk.rows].detach().requires_grad_(self.of_weights is not None)
        at_home.requires_grad_()
        with torch.enable_grad():
            out = self._run.combine(chunk, at_home, leaf, x[chunk.rows])
        inputs = [at_home, leaf] if leaf.requires_grad else [at_home]
        pull, *of_weights = torch.autograd.grad(out, inputs, grad_out[chunk.rows])
        if self.of_weights is not None:
            self.of_weights[chunk.rows] = of_weights[0]
        return pull

    def _differentiate(
        self,
        computed: torch.Tensor,
        pull: torch.Tensor,
        arrived: torch.Tensor,
        native: _Weights,
        foreign: _Weights,
    ) -> tuple[torch.Tensor | None, ...]:
        leaves = [arrived, *native, *(foreign if self._run.migration.foreign else ())]
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        if not inputs:
            return ()
        return torch.autograd.grad(computed, inputs, pull, allow_unused=True)

    def of_parameters(self) -> list[torch.Tensor | None]:
        """By parameter, with what other ranks computed. Call once, on every rank."""
        run, sums = self._run, zip(self._native, self._foreign, strict=True)
        weights = zip(run.native, run.foreign, self._wanted, strict=True)
        return [self._whole(own, others, *next(sums)) if w else None for own, others, w in weights]

    def _whole(
        self, own: torch.Tensor, others: torch.Tensor, native: "_Sum", foreign: "_Sum"
    ) -> torch.Tensor:
        migration = self._run.migration
        migration.send_home(
            foreign.wide(others) if migration.foreign else None,
            native.wide(own) if migration.lends else None,
        )
        return native.rounded(own)


class _Sum:
    """A sum of gradients in full precision; of one part, that part as it is."""

    def __init__(self, single: bool) -> None:
        self._single = single
        self._total: torch.Tensor | None = None

    def add(self, part: torch.Tensor | None) -> None:
        if part is None:
            return
        if self._total is not None:
            self._total += part
        elif self._single:
            self._total = part
        else:
            self._total = part.to(accumulation_dtype(part.dtype), copy=True)

    def wide(self, like: torch.Tensor) -> torch.Tensor:
        """The sum in full precision, to be added to in place; zeros if there was no part."""
        dtype = accumulation_dtype(like.dtype)
        if self._total is None:
            self._total = torch.zeros_like(like, dtype=dtype)
        self._total = self._total.to(dtype).contiguous()
        return self._total

    def rounded(self, like: torch.Tensor) -> torch.Tensor:
        """The sum in the dtype of the parameter; lets go of it."""
        total, self._total = self._total, None
        return torch.zeros_like(like) if total is None else total.to(like.dtype)
