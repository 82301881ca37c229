"""Routed experts a chunk of the tokens at a time, with nothing kept for backward but its inputs.

Forward runs the chunks without a graph. Backward runs each once more, its exchanges between ranks
included, differentiates it, and lets its graph go before the next begins. So the experts run twice,
and the rows that are dispatched, which grow with a rank's share of the load, are those of one
chunk.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

from components.expert_dispatch.partition import Partition
from components.recompute.tape import output
from kernels.precision import accumulation_dtype

Routed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Tokens (t, D), weights (t, k), expert ids (t, k) -> (t, D): dispatch, experts, combine.

Draws no random numbers. All ranks of its group call it as often, also with no token at all."""


def run_in_chunks(
    routed: Routed,
    experts: nn.Module,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    partition: Partition,
) -> torch.Tensor:
    """``routed`` of all tokens.

    Gradients of tokens and weights are not split over chunks. Those of parameters come from each
    chunk in the parameter's dtype, are summed in full precision, rounded again and returned once.

    Args:
        routed: see ``Routed``.
        experts: whose parameters take part. FSDP gathers them, and reduces their gradients, with
            the layer around them: once per pass, whatever the number of chunks.
        x: (T, D).
        weights: (T, k).
        ids: int64 (T, k).
        partition: of the T tokens; with as many chunks on every rank.

    Returns:
        (T, D).
    """
    return _InChunks.apply(routed, experts, partition, x, weights, ids, *experts.parameters())


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        routed: Routed,
        experts: nn.Module,
        partition: Partition,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        # In a layer's second run it comes from the tape, and nothing runs.
        out = output(lambda: _run_forward(routed, partition, x, weights, ids))
        ctx.save_for_backward(x, weights, ids)
        ctx.routed, ctx.experts, ctx.partition = routed, experts, partition
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, ids = ctx.saved_tensors
        _, _, _, of_x, of_weights, _, *of_parameters = ctx.needs_input_grad
        parameters = tuple(ctx.experts.parameters())
        wanted = [p for p, needed in zip(parameters, of_parameters, strict=True) if needed]
        grads = _Gradients((x, of_x), (weights, of_weights), wanted, ctx.partition.chunks)
        for rows in _chunks(ctx.partition):
            grads.add(ctx.routed, rows, ids[rows], grad_out[rows])
        totals = iter(grads.of_parameters())
        of_each = [next(totals) if needed else None for needed in of_parameters]
        return None, None, None, *grads.of_rows, None, *of_each


def _chunks(partition: Partition) -> Iterator[slice]:
    return map(partition.rows, range(partition.chunks))


def _run_forward(
    routed: Routed,
    partition: Partition,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    out: torch.Tensor | None = None
    for rows in _chunks(partition):
        part = routed(x[rows], weights[rows], ids[rows])
        if out is None:
            out = part.new_empty(len(x), *part.shape[1:])
        out[rows] = part
    assert out is not None
    return out


class _Gradients:
    """The gradients of one call, as far as the chunks have come.

    Attributes:
        of_rows: of tokens and weights; None where not wanted.
    """

    def __init__(
        self,
        x: tuple[torch.Tensor, bool],
        weights: tuple[torch.Tensor, bool],
        parameters: list[nn.Parameter],
        chunks: int,
    ) -> None:
        """
        Args:
            x, weights: all rows, and whether their gradients are wanted.
            parameters: those whose gradients are wanted.
        """
        self._rows = (x[0], weights[0])
        # Every row is one chunk's: plain assignment, no sum.
        self.of_rows = [torch.empty_like(t) if wanted else None for t, wanted in (x, weights)]
        self._parameters = parameters
        self._totals: list[torch.Tensor | None] = [None] * len(parameters)
        self._single = chunks == 1

    def add(self, routed: Routed, rows: slice, ids: torch.Tensor, grad_out: torch.Tensor) -> None:
        """Run a chunk and differentiate it; nothing of it is left but its gradients."""
        x, weights = (
            tensor[rows].detach().requires_grad_(grad is not None)
            for tensor, grad in zip(self._rows, self.of_rows, strict=True)
        )
        with torch.enable_grad():
            out = routed(x, weights, ids)
        inputs = [leaf for leaf in (x, weights) if leaf.requires_grad]
        found = [
            *torch.autograd.grad(out, [*inputs, *self._parameters], grad_out, allow_unused=True)
        ]
        for grad in self.of_rows:
            if grad is not None:
                part = found.pop(0)
                grad[rows] = 0 if part is None else part
        for index, part in enumerate(found):
            if part is not None:
                self._add_to_parameter(index, part)

    def _add_to_parameter(self, index: int, grad: torch.Tensor) -> None:
        total = self._totals[index]
        if self._single:
            self._totals[index] = grad
        elif total is None:
            self._totals[index] = grad.to(accumulation_dtype(grad.dtype), copy=True)
        else:
            total.add_(grad)

    def of_parameters(self) -> list[torch.Tensor | None]:
        """The sums, rounded to the parameters' dtypes. Call once: lets go of them one by one."""
        rounded = []
        for index, parameter in enumerate(self._parameters):
            total, self._totals[index] = self._totals[index], None
            rounded.append(None if total is None else total.to(parameter.dtype))
        return rounded
