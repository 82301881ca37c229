"""Tokens go round the ring; compute shards stay. Strips are computed again in backward.

One of the two schedules of arXiv 2609.14306, section 3.2. In backward the gradient of the hidden
states rides with them and ends at their owner. Statistics do not ride: each rank keeps those of
its own columns for every visitor, and one all-to-all brings them home, because a hop of 16 bytes a
token per meeting would be all latency. Targets, normalisers and incoming gradients are gathered at
the beginning for the same reason.
"""

from typing import Any

import torch
import torch.distributed as dist

from components.vocabulary.collectives import swap
from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.ring import RidingSum, Ring, travelling
from components.vocabulary.tokens import Tokens, agree, check_arguments, everyones
from components.vocabulary.visit import gradients, statistics
from kernels.precision import accumulation_dtype
from kernels.vocabulary_loss.state import entropy, log_probability, merge, new_state, normaliser


def move_activations(
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

    Besides its results it holds one strip of at most rows * v_q logits, two ranks' hidden states in
    transit and at most 48 bytes per token of the ring: its target and its statistics, these twice
    while they come home and are merged. In backward it also holds three dX of a rank in full
    precision (with one rank: one, in the dtype of x).

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
    return _MoveActivations.apply(x, w, tokens, layout, group, rows, dw)


class _MoveActivations(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        tokens: Tokens,
        layout: VocabularyLayout,
        group: dist.ProcessGroup | None,
        rows: int,
        dw: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ring, wide = Ring(group), accumulation_dtype(x.dtype)
        hidden = tokens.take(x, slice(0, tokens.counted)).contiguous()
        columns = _columns(tokens, layout, group)
        longest = max(tokens.counts)
        # One tensor before there are strips: they are sent as one in the end.
        states = torch.stack(
            [new_state(longest, entropy=True, dtype=wide, device=x.device) for _ in tokens.counts]
        )
        for owner, visitor in travelling(ring, hidden, tokens.counts):
            seen = states[owner][:, : len(visitor)]
            statistics(visitor, w, columns[owner], seen, rows)
        state = _bring_home(states, group)[:, : tokens.counted]
        ctx.save_for_backward(x, w, normaliser(state), *columns)
        ctx.rest = tokens, group, rows, dw
        spread = tokens.spread(entropy(state))
        ctx.mark_non_differentiable(spread)
        return tokens.spread(log_probability(state)), spread

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, lse, *columns = ctx.saved_tensors
        tokens, group, rows, dw = ctx.rest
        ring, everything = Ring(group), slice(0, tokens.counted)
        hidden = tokens.take(x, everything).contiguous()
        norms = everyones(lse, tokens.counts, group)
        scales = everyones(tokens.take(grad, everything).neg(), tokens.counts, group)
        # Summed over the shards in full precision; with one shard there is nothing to sum.
        dtype = x.dtype if ring.size == 1 else accumulation_dtype(x.dtype)
        riding = RidingSum(ring, tokens.counts, x.shape[1], x, dtype)
        for owner, visitor in travelling(ring, hidden, tokens.counts):
            about = visitor, w, columns[owner], norms[owner], scales[owner]
            gradients(*about, riding.begin(), dw, rows, first=True)
            riding.end()
        return tokens.restore(riding.home(), x), *(None,) * 6


def _columns(
    tokens: Tokens, layout: VocabularyLayout, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Of every rank's tokens, the targets as columns of this rank's strips."""
    theirs = everyones(tokens.targets, tokens.counts, group)
    return [layout.columns(targets, tokens.rank) for targets in theirs]


def _bring_home(states: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """From (ring, 4, longest) states of every rank's tokens in this rank's columns, the state of
    this rank's tokens in all columns: (4, longest)."""
    if group is None:
        return states[0]
    return merge(swap(states, group))
