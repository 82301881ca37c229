"""KDA with the sequence split over ranks: each runs its own tokens and takes up the state.

Between ranks pass one state's worth of summaries per part, whatever its length: 4 bytes x heads x
dk x (dk + dv) to each other rank, forward and backward; and the tokens before a part that its
convolutions see, hidden states of the mixer's input, which are projected once more here. Nothing is
sent when no document is cut.

A rank goes through its last document three times more than by itself: for the summary, and, in
backward, forward and backward once more for what later parts ask of the state that it left.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from components.context_parallel.halo import Halo
from components.context_parallel.share import Share
from components.context_parallel.state_chain import StateChain, passes_through
from components.models.glm_flash.chunked.pieces import Piece
from components.models.glm_flash.kda import KDA
from components.recompute.tape import choice
from kernels.precision import accumulation_dtype

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def kda_state(module: KDA, x: torch.Tensor, share: Share) -> torch.Tensor:
    """``module`` on this rank's tokens, by passing on states.

    Equal to one process up to rounding: a document's chunks are counted from the part's start.
    Each parameter's gradient is this rank's share.

    Args:
        x: (n, D), the mixer's input.
        share: of n tokens.

    Returns:
        (n, D).

    Raises:
        ValueError: x has other rows, or parts are shorter than the convolution reaches.
    """
    share.check_rows(x)
    halo = Halo(share, module.q_conv.weight.shape[-1] - 1)
    seen = halo.extend(x, "kda.halo")
    q, k, v = (halo.trim(y) for y in module.convolved(seen, halo.documents))
    raw_gate, beta = module.gates(x)
    core = module.core
    kernel = partial(core.piece_kernel, lower_bound=core.lower_bound)
    shared = core.A_log, core.dt_bias
    states: Sequence[torch.Tensor | None] = [None] * len(share.parts)
    if share.layout.crosses:
        q, entering = _EnteringStates.apply(share, kernel, q, k, v, raw_gate, beta, *shared)
        states = entering.unbind()
    outputs = []
    for part, rows, state in zip(share.parts, share.rows, states, strict=True):
        own = [y[rows] for y in (q, k, v, raw_gate, beta)]
        entered = state if part.continued else None
        outputs.append(kernel(*own, *shared, part.lengths, entered)[0])
    return module.project(torch.cat(outputs), x)


class _EnteringStates(torch.autograd.Function):
    """From share, kernel, and this rank's q, k, v, raw_gate, beta, A_log, dt_bias: q as it is, and
    the states that enter this rank's parts (parts, H, dk, dv).

    q passes through so that backward, in which all ranks exchange, comes here on every rank,
    whether or not any state is used.
    """

    @staticmethod
    def forward(
        ctx: Any, share: Share, kernel: Kernel, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, _, v = tensors[:3]
        # In a layer's second run these come from the tape, and nothing is computed or sent. They
        # are small beside the output.
        kept = choice(lambda: _states_and_maps(share, kernel, tensors))
        states, maps = kept.split([v.shape[-1], q.shape[-1]], -1)
        ctx.save_for_backward(*tensors, states, maps)
        ctx.share, ctx.kernel = share, kernel
        return q.view_as(q), states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_q: torch.Tensor, grad_states: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        *tensors, states, maps = ctx.saved_tensors
        share: Share = ctx.share
        chain = StateChain(share.layout, share.link)
        to_left = chain.leaving(grad_states.contiguous(), maps)
        # The state does not depend on q.
        grads = [torch.zeros_like(y) for y in tensors[1:]]
        for part, rows, state, pull in zip(share.parts, share.rows, states, to_left, strict=True):
            if part.carries:
                document = _last(part, rows)
                found = _pulled(ctx.kernel, part, document, tensors, state, pull)
                for total, grad in zip(grads[:4], found[:4], strict=True):
                    total[document] = grad
                for total, grad in zip(grads[4:], found[4:], strict=True):
                    total += grad
        return None, None, grad_q, *grads


def _states_and_maps(share: Share, kernel: Kernel, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The states that enter this rank's parts and, beside them, A of each part: (parts, H, dk,
    dv + dk)."""
    q, _, v = tensors[:3]
    shape, dtype = (len(share.parts), *q.shape[1:]), accumulation_dtype(q.dtype)
    offsets = q.new_zeros(*shape, v.shape[-1], dtype=dtype)
    maps = q.new_zeros(*shape, q.shape[-1], dtype=dtype)
    for number, (part, rows) in enumerate(zip(share.parts, share.rows, strict=True)):
        if part.carries:
            offset, matrix = _summary(kernel, part, _last(part, rows), tensors)
            offsets[number] = offset
            if matrix is not None:
                maps[number] = matrix
    states = StateChain(share.layout, share.link).entering(offsets, maps)
    return torch.cat([states, maps], -1)


def _last(part: Piece, rows: slice) -> slice:
    """Where the last document of a part is among this rank's tokens."""
    return slice(rows.stop - part.lengths[-1], rows.stop)


def _summary(
    kernel: Kernel, part: Piece, document: slice, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """B, and A where something may enter: B is what zeros leave, with values; A what the identity
    leaves, without. Both come from one run, side by side."""
    q, k, v, raw_gate, beta = (y[document] for y in tensors[:5])
    shared, length, state = tensors[5:], document.stop - document.start, None
    if passes_through(part):
        heads, width = q.shape[1:]
        dtype = accumulation_dtype(q.dtype)
        identity = torch.eye(width, dtype=dtype, device=q.device).expand(heads, -1, -1)
        state = torch.cat([q.new_zeros(*v.shape[1:2], width, v.shape[2], dtype=dtype), identity], 2)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], width)], 2)
    _, left = kernel(q, k, v, raw_gate, beta, *shared, (length,), state, carries=True)
    assert left is not None
    if state is None:
        return left, None
    values = tensors[2].shape[-1]
    return left[..., :values], left[..., values:]


def _pulled(
    kernel: Kernel,
    part: Piece,
    document: slice,
    tensors: Sequence[torch.Tensor],
    state: torch.Tensor,
    pull: torch.Tensor,
) -> list[torch.Tensor]:
    """Gradients of k, v, raw_gate, beta, A_log and dt_bias through the state that a part leaves."""
    rows = [y[document].detach().requires_grad_() for y in tensors[1:5]]
    shared = [y.detach().requires_grad_() for y in tensors[5:]]
    entered = state if passes_through(part) else None
    length = document.stop - document.start
    with torch.enable_grad():
        _, left = kernel(tensors[0][document], *rows, *shared, (length,), entered, carries=True)
    assert left is not None
    return list(torch.autograd.grad(left, [*rows, *shared], pull))
