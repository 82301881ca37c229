"""Loss and gradients from one visit to each strip of logits: three matrix products.

A round takes tokens from every rank of the ring and multiplies them with every rank's compute
shard: rank q gets a strip (rows, v_q) of their logits. The ranks tell each other the statistics of
their strips (12 bytes a token and rank), and with those each turns its strip into the gradient of
the logits, in place, while it is still there. From it come its own dW, and parts of dX that are
summed over the ranks. Nothing is computed twice; for that the factor of the loss must be known in
advance, so it serves a loss that is a sum over tokens.
"""

import torch
import torch.distributed as dist

from components.vocabulary.exchange import Alone, Exchange, Together
from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.rounds import Rounds
from components.vocabulary.strips import strip_buffer
from components.vocabulary.tokens import agree, check_arguments, everyones
from kernels.precision import accumulation_dtype
from kernels.products import add_product, multiply
from kernels.vocabulary_loss.op import fold_strip, gradient_
from kernels.vocabulary_loss.state import log_probability, new_state, normaliser


@torch.no_grad()
def fused(
    x: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    layout: VocabularyLayout,
    group: dist.ProcessGroup | None,
    *,
    scale: torch.Tensor,
    rows: int,
    dw: torch.Tensor | None,
    wants_dx: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sum of -log p over this rank's tokens; gradients of ``scale`` times the sum of all ranks.

    All ranks of the ring call it together, whatever tokens they have, with equal ``rows`` and
    ``wants_dx``, all of them with ``dw`` or none.

    Besides its results it holds one strip of at most rows * v_q logits. With several ranks also up
    to 2 * rows * (1 + 1 / ring) * H numbers of hidden states (two rounds, gathered and this rank's
    share) and, in full precision, rows * (1 + 1 / ring) * H of dX. Per token of a rank, its hidden
    state goes to ring - 1 others, and as many parts of its dX, in full precision, come back.

    Args:
        x: (n, H), hidden states in the compute dtype. n may differ between ranks and be 0.
        w: (layout.rows(q), H), q being the rank in ``group``: contiguous, dtype of x.
        targets: int64 (n,), entries of the vocabulary, or ``IGNORED``.
        layout: which rows of the vocabulary each rank of the ring has.
        group: the ring; None for a ring of one.
        scale: () or (1,) in ``accumulation_dtype`` of x, the same on all ranks: the factor of all
            gradients, such as 1 / number of tokens that count anywhere.
        rows: tokens of one strip, of all ranks together; a multiple of ``layout.ring``.
        dw: like w; the gradient of w is added to it, with float32 sums if it is float32 and rounded
            once per strip if it has the dtype of x. None: not wanted.
        wants_dx: whether dX is. Without dW and dX it is a forward alone.

    Returns:
        The sum over this rank's tokens of -log p, not scaled, a scalar in ``accumulation_dtype``;
        dX (n, H) in the dtype of x, zero for ignored tokens, or None.

    Raises:
        ValueError: arguments that do not belong together; on all ranks, targets out of range.
    """
    check_arguments(x, w, targets, layout, group, rows, dw)
    tokens = agree(targets, layout, group)
    rounds = Rounds.plan(tokens.counts, rows)
    dx = _new_dx(x, tokens.index) if wants_dx else None
    exchange: Exchange = (
        Alone(x, dx, tokens, rounds) if group is None else Together(x, dx, tokens, rounds, group)
    )
    columns = [
        layout.columns(theirs, tokens.rank)
        for theirs in everyones(tokens.targets, tokens.counts, group)
    ]
    wide = accumulation_dtype(x.dtype)
    losses = x.new_zeros(tokens.counted, dtype=wide)
    buffer = strip_buffer(rounds.strip_rows, len(w), x)
    for i in range(rounds.number):
        hidden, runs, places = exchange.tokens(i), rounds.runs(i), rounds.strip(i)
        strip = buffer[: places[-1].stop]
        for gathered, some in runs:
            multiply(strip[some], hidden[gathered], w.t())
        at = torch.cat([theirs[rounds.some(i, r)] for r, theirs in enumerate(columns)])
        state = new_state(len(strip), entropy=False, dtype=wide, device=x.device)
        fold_strip(strip, at, state)
        state = exchange.merged(state)
        mine = state[:, places[tokens.rank]]
        losses[rounds.some(i, tokens.rank)] = log_probability(mine).neg_()
        if dx is None and dw is None:
            continue
        gradient_(strip, at, normaliser(state), scale)
        if dx is not None:
            exchange.give(i, strip, w)
        if dw is not None:
            for gathered, some in runs:
                add_product(dw, strip[some].t(), hidden[gathered])
    exchange.finish()
    return losses.sum(), dx


def _new_dx(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Rows of ignored tokens are never written."""
    like = torch.empty_like if index is None else torch.zeros_like
    return like(x, memory_format=torch.contiguous_format)
