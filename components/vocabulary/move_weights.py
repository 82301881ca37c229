"""Compute shards go round the ring; tokens stay. Strips are computed again in backward.

One of the two schedules of arXiv 2609.14306, section 3.2. In backward the gradient of a shard rides
with it and ends at its owner.
"""

from typing import Any

import torch
import torch.distributed as dist

from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.ring import RidingSum, Ring, travelling
from components.vocabulary.tokens import Tokens, agree, check_arguments
from components.vocabulary.visit import gradients, statistics
from kernels.precision import accumulation_dtype
from kernels.vocabulary_loss.state import entropy, log_probability, new_state, normaliser


def move_weights(
    x: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    layout: VocabularyLayout,
    group: dist.ProcessGroup | None,
    *,
    rows: int,
    dw: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of each token's target, and the entropy of each token's prediction.

    All ranks of the ring call it, and run its backward, together, whatever tokens they have.
    Differentiable in x. The gradient of w is not returned but added to ``dw`` in backward, which
    runs if x requires a gradient.

    Besides its results it holds one strip of at most rows * v logits, v = ``layout.widest``, and
    two shards in transit; in backward also dX in full precision and three dW of a shard in full
    precision (neither with one rank).

    Args:
        x: (n, H), hidden states in the compute dtype. n may differ between ranks and be 0.
        w: (layout.rows(q), H), q being the rank in ``group``: contiguous, dtype of x.
        targets: int64 (n,), entries of the vocabulary, or ``IGNORED``.
        layout: which rows of the vocabulary each rank of the ring has.
        group: the ring; None for a ring of one.
        rows: tokens of one strip; a multiple of ``layout.ring``.
        dw: like w, in its dtype or in ``accumulation_dtype`` of it; None: not wanted.

    Returns:
        Both (n,) in ``accumulation_dtype`` of x, zero for ignored tokens. The entropy has no
        gradient.

    Raises:
        ValueError: arguments that do not belong together; on all ranks, targets out of range.
    """
    check_arguments(x, w, targets, layout, group, rows, dw)
    tokens = agree(targets, layout, group)
    return _MoveWeights.apply(x, w, tokens, layout, Ring(group), rows, dw)


class _MoveWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        tokens: Tokens,
        layout: VocabularyLayout,
        ring: Ring,
        rows: int,
        dw: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = tokens.take(x, slice(0, tokens.counted))
        wide = accumulation_dtype(x.dtype)
        state = new_state(tokens.counted, entropy=True, dtype=wide, device=x.device)
        for owner, shard in travelling(ring, w, _shard_rows(layout)):
            statistics(hidden, shard, layout.columns(tokens.targets, owner), state, rows)
        ctx.save_for_backward(x, w, normaliser(state))
        ctx.rest = tokens, layout, ring, rows, dw
        spread = tokens.spread(entropy(state))
        ctx.mark_non_differentiable(spread)
        return tokens.spread(log_probability(state)), spread

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, lse = ctx.saved_tensors
        tokens, layout, ring, rows, dw = ctx.rest
        everything = slice(0, tokens.counted)
        hidden, scale = tokens.take(x, everything), tokens.take(grad, everything).neg()
        wide = accumulation_dtype(x.dtype)
        # Summed over the shards in full precision; with one shard there is nothing to sum.
        dx = torch.empty_like(hidden, dtype=x.dtype if ring.size == 1 else wide)
        shards = _shard_rows(layout)
        riding = None
        if dw is not None and ring.size > 1:
            riding = RidingSum(ring, shards, x.shape[1], x, wide)
        for meeting, (owner, shard) in enumerate(travelling(ring, w, shards)):
            part = dw if riding is None else riding.begin().zero_()
            columns = layout.columns(tokens.targets, owner)
            first = meeting == 0
            gradients(hidden, shard, columns, lse, scale, dx, part, rows, first=first)
            if riding is not None:
                riding.end()
        if riding is not None:
            dw += riding.home()
        return tokens.restore(dx, x), *(None,) * 6


def _shard_rows(layout: VocabularyLayout) -> list[int]:
    return [layout.rows(q) for q in range(layout.ring)]
