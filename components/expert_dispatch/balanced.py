"""Routed experts whose rows are spread over the ranks by a plan, a chunk of the tokens at a time.

One function of autograd around everything: rows to the ranks that compute them, the products over
native and foreign experts, rows home. So every rank enters its backward, whatever it computed, and
nothing but tokens, weights and ids is kept. Backward fetches the foreign weights again, runs each
chunk once more but for its last product, lets its graph go before the next begins, and sends the
gradients of foreign weights home once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh

from components.expert_dispatch.last_product import ExpertGradients
from components.expert_dispatch.layer_plan import LayerPlan
from components.expert_dispatch.rows import ChunkRows
from components.expert_dispatch.weights import Migration
from components.recompute.tape import output
from components.titan.experts import hidden_of
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

    def experts(self, chunk: "_Chunk", rows: torch.Tensor) -> torch.Tensor:
        """Rows where they are computed (R, D) -> (R, D)."""
        outputs = [
            self._apply(weights, part, counts)
            for weights, counts, (part,) in self.parts(chunk, rows)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def parts(
        self, chunk: "_Chunk", *tensors: torch.Tensor
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor, list[torch.Tensor]]]:
        """Weights, rows of each expert, and parts of tensors (R, ...): native, then foreign.

        Apart, so that native weights are not copied next to the foreign ones.
        """
        moves, cut = chunk.moves, chunk.moves.native_rows
        if not self.migration.foreign:
            yield self._named(self.native), moves.native, list(tensors)
            return
        yield self._named(self.native), moves.native, [tensor[:cut] for tensor in tensors]
        yield self._named(self.foreign), moves.foreign, [tensor[cut:] for tensor in tensors]

    def _named(self, weights: _Weights) -> dict[str, torch.Tensor]:
        return dict(zip(self._names, weights, strict=True))

    def _apply(
        self, weights: dict[str, torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        with maybe_set_sparse_mesh():
            return functional_call(self.around.experts, weights, (rows, counts))

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
        self._hidden = hidden_of(run.around.experts)
        single = len(run.layer.chunks) == 1
        self._sums = [[_Sum(single) for wish in wanted if wish] for _ in ("native", "foreign")]

    def add(
        self, chunk: _Chunk, x: torch.Tensor, weights: torch.Tensor, grad_out: torch.Tensor
    ) -> None:
        """Run a chunk and differentiate it; nothing of it is left but its gradients."""
        moves, rows = chunk.moves, chunk.rows
        given = (
            moves.dispatch(x[rows]),
            moves.dispatch(grad_out[rows]),
            moves.dispatch_routes(weights[rows]),
        )
        of_rows, of_weights = self._of_parts(chunk, *given)
        del given
        # A rank that computed no row has its part in the exchanges all the same.
        if self.of_x is not None:
            self.of_x[rows] = moves.sum_routes(moves.home(torch.cat(of_rows)))
        if self.of_weights is not None:
            at_home = moves.home(torch.cat(of_weights))
            self.of_weights[rows] = at_home[moves.place_of_route].to(self.of_weights.dtype)

    def _of_parts(
        self, chunk: _Chunk, arrived: torch.Tensor, pull: torch.Tensor, weights: torch.Tensor
    ) -> tuple[_Weights, _Weights]:
        """Gradients of rows and of their weights, native then foreign; adds the parameters'."""
        of_rows, of_weights = [], []
        parts = self._run.parts(chunk, arrived, pull, weights)
        for sums, (parameters, counts, (rows, *given)) in zip(self._sums, parts, strict=False):
            with maybe_set_sparse_mesh():
                wish = rows, self.of_x is not None
                grads = ExpertGradients(
                    self._hidden, parameters, self._wanted, wish, counts, *given
                )
            if grads.of_rows is not None:
                of_rows.append(grads.of_rows)
            of_weights.append(grads.of_weights)
            for total, part in zip(sums, grads.of_parameters, strict=True):
                total.add(part)
        return of_rows, of_weights

    def of_parameters(self) -> list[torch.Tensor | None]:
        """By parameter, with what other ranks computed. Call once, on every rank."""
        run, sums = self._run, zip(*self._sums, strict=True)
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

    def add(self, part: torch.Tensor) -> None:
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
