"""Routed experts whose rows are spread over the ranks by a plan, a chunk of the tokens at a time.

One function of autograd around everything: rows to the ranks that compute them, the products over
native and foreign experts, rows home. So every rank enters its backward, whatever it computed, and
nothing need be kept but tokens, weights and ids. Backward fetches the foreign weights again, runs
each chunk once more but for its last product, and sends the gradients of foreign weights home once.

So backward runs two products again, beside six of its own and three of forward: 11 instead of 9.
The two, gate and up, can be kept instead, 2 k F values a token. Backward begins with the last chunk
and would hold its products then anyway: to keep those of one chunk costs no memory at its peak, and
those of a second hardly more than what is on its way home later on.
"""

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from components.expert_dispatch.last_product import GateAndUp
from components.expert_dispatch.layer_gradients import Gradients
from components.expert_dispatch.layer_pass import LayerPass, Surroundings
from components.expert_dispatch.layer_plan import LayerPlan
from components.expert_dispatch.rows import ChunkRows
from components.expert_dispatch.travel import Homeward, Outward
from components.recompute.tape import output


def run_balanced(
    around: Surroundings,
    layer: LayerPlan,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    kept_chunks: int = 0,
) -> torch.Tensor:
    """The experts of all tokens. All ranks of the group call it, also without any token.

    Gradients of tokens are summed over a token's routes in full precision. So are those of
    parameters over chunks, unless ``around.rounded_sums``, and over ranks that computed an expert;
    with one chunk each rank's part is rounded to the parameter's dtype first. They are returned
    once.

    Args:
        layer: of the routes of all ranks.
        x: tokens (T, D).
        weights: (T, k).
        ids: experts, int64 (T, k).
        kept_chunks: the last ones, whose first two products are kept for backward; all at most.
            Gradients are the same.

    Returns:
        (T, D).
    """
    return _Balanced.apply(around, layer, kept_chunks, x, weights, ids, *_parameters(around))


def _parameters(around: Surroundings) -> list[torch.Tensor]:
    """This rank's share of them, as plain tensors."""
    parameters = around.experts.parameters()
    return [p.to_local() if isinstance(p, DTensor) else p for p in parameters]


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        around: Surroundings,
        layer: LayerPlan,
        kept_chunks: int,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        made: list[torch.Tensor] = []
        count = layer.partition.chunks
        chunks = range(max(0, count - kept_chunks), count)
        # In a layer's second run everything comes from the tape, and no rank runs anything.
        out = output(
            lambda: _forward(LayerPass(around, layer, ids, parameters), x, weights, made, chunks)
        )
        each = _products(layer)
        kept = [output(partial(_nth, made, place)) for place in range(len(chunks) * each)]
        made.clear()
        ctx.save_for_backward(x, weights, ids)
        # Not through save_for_backward, which would hold all of them until backward ends.
        ctx.kept = {chunk: kept[i * each :][:each] for i, chunk in enumerate(chunks)}
        ctx.around, ctx.layer = around, layer
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, ids = ctx.saved_tensors
        _, _, _, of_x, of_weights, _, *wanted = ctx.needs_input_grad
        # As they are now: FSDP may have freed and gathered them since.
        run = LayerPass(ctx.around, ctx.layer, ids, [p.detach() for p in _parameters(ctx.around)])
        grads = Gradients(run, x if of_x else None, weights if of_weights else None, wanted)
        grads.run(x, weights, grad_out, ctx.kept)
        return None, None, None, grads.of_x, grads.of_weights, None, *grads.of_parameters


def _nth(tensors: list[torch.Tensor], index: int) -> torch.Tensor:
    return tensors[index]


def _products(layer: LayerPlan) -> int:
    """Two of every part of a chunk."""
    foreign = any(move.helper == layer.rank for move in layer.plan.transfers)
    return 4 if foreign else 2


def _forward(
    run: LayerPass, x: torch.Tensor, weights: torch.Tensor, kept: list[torch.Tensor], keep: range
) -> torch.Tensor:
    """All chunks; the first two products of every part of those in ``keep`` go to ``kept``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x = x.contiguous()

    def compute(index: int, moves: ChunkRows, arriving: Outward) -> list[torch.Tensor]:
        outputs = []
        for part in run.parts(moves):
            products: list[GateAndUp] = [part.runs.gate_and_up(arriving.take(0, part.rows))]
            if index in keep:
                kept.extend(products[0])
            outputs.append(part.runs.outputs(*products.pop()).to(x.dtype))
        return outputs

    def give(_: int, moves: ChunkRows, computed: list[torch.Tensor]) -> Homeward:
        return run.send_home(moves, computed)

    def land(index: int, moves: ChunkRows, leaving: Homeward) -> None:
        tokens = run.tokens(index)
        of_routes = weights[tokens].gather(1, moves.choice)
        run.around.combine(leaving.arrive(), moves.place, of_routes, out[tokens])
        leaving.close()

    run.in_turn(lambda index: run.send(index, [x], None), compute, give, land)
    run.finish_fetch()
    return out
