"""KDA in plain torch, in chunks: trains on any device, in bounded memory at any length.

Kept for backward: the inputs in their own dtype, and one state (H, dk, dv) per ``SEGMENT`` chunks.
Beyond that, forward and backward hold the intermediates of one segment at a time.
"""

from typing import Any

import torch

from kernels.kda import chunks
from kernels.kda.inputs import check_arguments, check_state, steepness
from kernels.kda.segments import Segment, segments
from kernels.precision import accumulation_dtype

SEGMENT = 64
"""Chunks that are computed together: 1,024 tokens where documents fill them."""


class _ChunkedKda(torch.autograd.Function):
    """Arguments: lengths, lower bound, state or None, then q, k, v, raw_gate, beta (T, H, 1),
    A_log, dt_bias. Results: the output, and the state that the last token leaves."""

    @staticmethod
    def forward(
        ctx: Any,
        lengths: tuple[int, ...],
        lower_bound: float,
        state: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, _, v = tensors[:3]
        dtype = accumulation_dtype(q.dtype)
        ctx.continued = state is not None
        if state is None:
            state = q.new_zeros(*q.shape[1:], v.shape[-1], dtype=dtype)
        out, states = v.new_empty(v.shape), []
        for segment in segments(lengths, chunks.CHUNK, SEGMENT, q.device, ctx.continued):
            states.append(state)
            prepared = chunks.prepare(_inputs(segment, tensors, lower_bound, dtype))
            rows, state = chunks.forward(prepared, state, segment.fresh)
            segment.unpack(rows, out)
        ctx.save_for_backward(*tensors, torch.stack(states))
        ctx.set_materialize_grads(False)
        ctx.lengths, ctx.lower_bound = lengths, lower_bound
        return out, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_state: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *tensors, states = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(tensors[2])
        if grad_state is None:
            grad_state = torch.zeros_like(states[0])
        grads = [x.new_empty(x.shape) for x in tensors[:5]]
        totals = [torch.zeros_like(x, dtype=states.dtype) for x in tensors[5:]]
        cut = list(segments(ctx.lengths, chunks.CHUNK, SEGMENT, grad_out.device, ctx.continued))
        with torch.autocast(grad_out.device.type, enabled=False):
            for segment, state in zip(reversed(cut), reversed(states.unbind()), strict=True):
                inputs = _inputs(segment, tensors, ctx.lower_bound, states.dtype)
                rows, shared, grad_state = chunks.backward(
                    inputs, state, segment.fresh, segment.pack(grad_out, states.dtype), grad_state
                )
                for part, whole in zip(rows, grads, strict=True):
                    segment.unpack(part, whole)
                for part, total in zip(shared, totals, strict=True):
                    total += part
        cast = [total.to(x.dtype) for total, x in zip(totals, tensors[5:], strict=True)]
        return None, None, grad_state if ctx.continued else None, *grads, *cast


def _inputs(
    segment: Segment, tensors: tuple[torch.Tensor, ...], lower_bound: float, dtype: torch.dtype
) -> chunks.Inputs:
    q, k, v, raw_gate, beta = (segment.pack(x, dtype) for x in tensors[:5])
    A_log, dt_bias = tensors[5:]
    return chunks.Inputs(
        q=q, k=k, v=v, raw_gate=raw_gate, beta=beta,
        steepness=steepness(A_log, dtype).view(-1, 1, 1),
        bias=dt_bias.to(dtype).view(len(A_log), 1, -1),
        lower_bound=lower_bound,
        used=segment.used(dtype),
    )  # fmt: skip


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lengths: tuple[int, ...],
    *,
    lower_bound: float,
) -> torch.Tensor:
    """Kimi delta attention over packed documents.

    With q and k of unit length, q times dk ** -0.5, and per token and head the log decays
    g = lower_bound * sigmoid(exp(A_log) * (raw_gate + dt_bias)), the state S (dk, dv) of a head
    starts at zero with every document and goes

        S <- diag(exp(g)) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q

    Arithmetic is float32, or float64 where q is; gradients come in the dtypes of the inputs.

    Args:
        q, k: (T, H, dk), any float dtype and length.
        v: (T, H, dv).
        raw_gate: (T, H, dk).
        beta: (T, H), how much of the error is corrected, 0 to 1.
        A_log: (H,).
        dt_bias: (H * dk,).
        lengths: tokens of each document, T in all.
        lower_bound: of the log decay per token, -5 to below 0.

    Returns:
        o, (T, H, dv) in v's dtype.

    Raises:
        ValueError: shapes, lengths or the bound do not fit.
    """
    arguments = q, k, v, raw_gate, beta, A_log, dt_bias, lengths
    return kda_piece(*arguments, None, lower_bound=lower_bound)[0]


def kda_piece(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lengths: tuple[int, ...],
    state: torch.Tensor | None,
    *,
    lower_bound: float,
    carries: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``kda`` over a piece of a longer sequence, which may be cut inside a document.

    Pieces that hand on their states equal the whole up to rounding, gradients included.

    Args:
        lengths: tokens of each document in this piece.
        state: (H, dk, dv) in full precision, what the piece before left, if the first document
            began there; None where it begins here.
        carries: whether the last document goes on in the next piece.

    The other arguments and the errors are those of ``kda``.

    Returns:
        o, (T, H, dv) in v's dtype; and the state after the last token, shaped and typed as
        ``state``, or None where nothing is carried. Gradients pass through both states.
    """
    check_arguments(q, k, v, raw_gate, beta, A_log, dt_bias, lengths, lower_bound)
    check_state(state, q, v)
    with torch.autocast(q.device.type, enabled=False):
        out, left = _ChunkedKda.apply(
            lengths, lower_bound, state, q, k, v, raw_gate, beta.unsqueeze(-1), A_log, dt_bias
        )
    return out, left if carries else None
