"""Attention whose keys come to the queries: each part has one block with all keys that it sees."""

from typing import Any

import torch

from components.context_parallel.share import Share
from components.context_parallel.softmax.fetch import Fetch
from components.context_parallel.softmax.kernel import Kernel, Outputs, Scores, shift_of
from components.context_parallel.softmax.reach import Reach, own_block
from kernels.precision import accumulation_dtype


def attend_fetched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    share: Share,
    fetch: Fetch,
    scores: Scores,
    kernel: Kernel,
) -> Outputs:
    """This rank's queries over all keys that they see; differentiable.

    Args:
        q: (n, N, H), after the position encoding.
        k: (n, M, H), alike.
        v: (n, M, Hv).

    Returns:
        Output (n, N, Hv) in q's dtype and log-sum-exp (n, N) in ``accumulation_dtype``.
    """
    return _Fetched.apply(share, fetch, scores, kernel, q, k, v)


def pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values in one row per token: they travel together."""
    return torch.cat([k.flatten(1), v.flatten(1)], -1)


def unpack(
    rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of ``pack``, for rows of any tokens; k and v give the shapes."""
    width = k.shape[1] * k.shape[2]
    keys, values = rows.split([width, rows.shape[1] - width], -1)
    return keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])


def no_tokens(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``unpack`` needs of them. Backward keeps this and the rows; not the same twice."""
    return k.new_empty(0, *k.shape[1:]), v.new_empty(0, *v.shape[1:])


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        share: Share,
        fetch: Fetch,
        scores: Scores,
        kernel: Kernel,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Outputs:
        ctx.set_materialize_grads(False)
        reach, rows = Reach(share.layout, scores.window), pack(k, v)
        before = fetch.bring(rows, share, reach, "forward")
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
        for part, mine, ahead in zip(_held(share), share.rows, before, strict=True):
            keys, values = unpack(torch.cat([ahead, rows[mine]]), k, v)
            block = own_block(share, part, len(ahead))
            out[mine], lse[mine] = kernel.forward(q[mine], keys, values, block, scores)
        ctx.save_for_backward(q, rows, out, lse)
        ctx.keys_values = no_tokens(k, v)
        ctx.share, ctx.fetch, ctx.scores, ctx.kernel = share, fetch, scores, kernel
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, rows, out, lse = ctx.saved_tensors
        k, v = ctx.keys_values
        share, fetch, scores, kernel = ctx.share, ctx.fetch, ctx.scores, ctx.kernel
        reach = Reach(share.layout, scores.window)
        before = fetch.bring(rows, share, reach, "backward")
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        shift = shift_of(out, grad_out, grad_lse)
        grad_q, own = torch.empty_like(q), shift.new_empty(rows.shape)

        def gradients(part: int, mine: slice, ahead: torch.Tensor) -> torch.Tensor:
            # Of the rows before a part; those of the rank's own queries, keys and values are kept.
            keys, values = unpack(torch.cat([ahead, rows[mine]]), k, v)
            block = own_block(share, part, len(ahead))
            grad_q[mine], *grads = kernel.backward(
                grad_out[mine], shift[mine], lse[mine], q[mine], keys, values, block, scores
            )
            for total, grad in zip(unpack(own[mine], k, v), grads, strict=True):
                total.copy_(grad[len(ahead) :])
            return pack(*(grad[: len(ahead)] for grad in grads))

        fetch.send_back(map(gradients, _held(share), share.rows, before), own, share, reach)
        grad_k, grad_v = unpack(own, k, v)
        return None, None, None, None, grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _held(share: Share) -> tuple[int, ...]:
    return share.layout.held(share.rank)
