"""KDA with heads split over ranks: each runs the whole batch for its share of the heads.

Every rank has every position of its heads, so convolutions and states need nothing from others, and
the recurrence is computed as by one process. Outputs return to the ranks that hold their tokens;
the output gate, the norm and the output projection stay there. The pattern is that of DeepSpeed
Ulysses (arXiv 2309.14509).

Bytes that a rank sends per token that it holds, forward, for C ranks, hidden states of h and heads
of D in all, with e bytes per element: o takes e D (C - 1) / C. Before that, ``hidden`` sends
e h (C - 1): the ranks gather the mixer's input and project their own heads. ``projections`` sends
e (4 D + heads) (C - 1) / C: q, k, v, the raw gate and beta. Backward sends the same, but gradients
of hidden states in float32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.models.common import Linear

from components.context_parallel.collectives import (
    exchange_rows,
    gather_rows,
    to_batch_order,
    to_packed_order,
)
from components.context_parallel.layout import DEGREE
from components.context_parallel.share import Share
from components.models.glm_flash.kda import KDA, KdaCore
from components.models.glm_flash.short_conv import ShortConv


def kda_hidden(module: KDA, x: torch.Tensor, share: Share) -> torch.Tensor:
    """``module`` on this rank's tokens, by gathering hidden states.

    Each parameter's gradient is this rank's share: rows of projections, convolutions and gates that
    belong to other ranks' heads get zeros. Autograd keeps the gathered input, (all tokens, D).

    Args:
        x: (n, D), the mixer's input.
        share: of n tokens.

    Returns:
        (n, D).

    Raises:
        ValueError: the heads do not divide by the ranks, or x has other rows.
    """
    share.check_rows(x)
    heads = _Heads.of(module, share)
    whole = gather_rows(x, share.layout.order, share.link, "kda.hidden")
    q, k, v, raw_gate = (
        _project(linear, y, heads.channels)
        for linear, y in (
            (module.q_proj, whole),
            (module.k_proj, whole),
            (module.v_proj, whole),
            (module.f_b_proj, module.f_a_proj(whole)),
        )
    )
    beta = _project(module.b_proj, whole, heads.heads).sigmoid()
    out = _mix(module, heads, share, q, k, v, raw_gate, beta)
    return module.project(_return_outputs(out, share), x)


def kda_projections(module: KDA, x: torch.Tensor, share: Share) -> torch.Tensor:
    """As ``kda_hidden``, but tokens are projected where they are, and the projections exchanged."""
    share.check_rows(x)
    heads = _Heads.of(module, share)
    ranks, width = share.layout.ranks, heads.count * module.head_dim
    raw_gate, beta = module.gates(x)
    wide = [module.q_proj(x), module.k_proj(x), module.v_proj(x), raw_gate.flatten(1)]
    split = [y.unflatten(1, (ranks, -1)) for y in (*wide, beta)]
    # Rows for rank 0 first: (ranks, n, what a rank's heads need).
    rows = torch.cat(split, -1).transpose(0, 1).flatten(0, 1)
    sizes = share.layout.order.sizes
    rows = exchange_rows(rows, [len(x)] * ranks, sizes, share.link, "kda.projections")
    rows = to_batch_order(rows, share.layout.order)
    q, k, v, raw_gate, beta = rows.split([width] * 4 + [heads.count], -1)
    out = _mix(module, heads, share, q, k, v, raw_gate, beta)
    return module.project(_return_outputs(out, share), x)


@dataclass(frozen=True)
class _Heads:
    """A rank's heads, and the channels that belong to them."""

    count: int
    heads: slice
    channels: slice

    @staticmethod
    def of(module: KDA, share: Share) -> "_Heads":
        total, ranks = len(module.core.A_log), share.layout.ranks
        check_heads(total, ranks)
        count, width = total // ranks, module.head_dim
        first = share.rank * count
        return _Heads(
            count,
            slice(first, first + count),
            slice(first * width, (first + count) * width),
        )


def check_heads(heads: int, ranks: int) -> None:
    """Raise ValueError unless each of ``ranks`` gets as many of ``heads``."""
    if heads % ranks:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"{DEGREE}: {ranks} ranks cannot split {heads} heads (model.kda_heads); legal: {legal}"
        )


def _project(linear: Linear, x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Some of a projection's outputs."""
    bias = None if linear.bias is None else linear.bias[rows]
    return F.linear(x, linear.weight[rows], bias)


def _mix(
    module: KDA,
    heads: _Heads,
    share: Share,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """A rank's heads over the whole batch.

    Args:
        q, k, v: (all tokens, channels), before the convolutions; ``raw_gate`` alike.
        beta: (all tokens, heads).

    Returns:
        (all tokens, heads, head_dim).
    """

    def convolved(conv: ShortConv, y: torch.Tensor) -> torch.Tensor:
        # By its kernel: a call of the module would take the weights of all heads.
        documents = share.documents
        weight = conv.weight[heads.channels]
        y = conv.kernel(y.contiguous(), weight, documents.position, documents.lengths)
        return y.unflatten(-1, (heads.count, -1))

    core: KdaCore = module.core
    return core.kernel(
        convolved(module.q_conv, q),
        convolved(module.k_conv, k),
        convolved(module.v_conv, v),
        raw_gate.unflatten(-1, (heads.count, -1)),
        beta,
        core.A_log[heads.heads],
        core.dt_bias[heads.channels],
        share.documents.lengths,
        lower_bound=core.lower_bound,
    )


def _return_outputs(out: torch.Tensor, share: Share) -> torch.Tensor:
    """(all tokens, a rank's heads, head_dim) -> (this rank's tokens, all heads, head_dim)."""
    ranks, own = share.layout.ranks, share.layout.tokens_of(share.rank)
    rows = to_packed_order(out, share.layout.order)
    sizes = share.layout.order.sizes
    rows = exchange_rows(rows, sizes, [own] * ranks, share.link, "kda.outputs")
    return rows.unflatten(0, (ranks, own)).transpose(0, 1).flatten(1, 2)
