"""Statistics and gradients of a strip of logits in plain torch; see ``op`` for what they mean."""

import torch

from kernels.row_blocks import row_blocks
from kernels.vocabulary_loss.state import (
    LARGEST,
    MASS,
    NOTHING,
    TARGET,
    WEIGHTED,
    finite_or_zero,
    merge,
)


def fold_strip(strip: torch.Tensor, columns: torch.Tensor, state: torch.Tensor) -> None:
    """See ``kernels.vocabulary_loss.op.fold_strip``."""
    if strip.numel() == 0:
        return
    for block in row_blocks(*strip.shape):
        logits = strip[block].to(state.dtype)
        seen = _state_of(logits, columns[block], len(state) > WEIGHTED)
        state[:, block] = merge([state[:, block], seen])


def _state_of(logits: torch.Tensor, columns: torch.Tensor, entropy: bool) -> torch.Tensor:
    largest = logits.amax(1)
    mass = (logits - finite_or_zero(largest).unsqueeze(1)).exp_()
    target = logits.gather(1, columns.clamp(min=0).unsqueeze(1)).squeeze(1)
    state = logits.new_empty(4 if entropy else 3, len(logits))
    state[LARGEST] = largest
    state[MASS] = mass.sum(1)
    state[TARGET] = torch.where(columns >= 0, target, 0.0)
    if entropy:
        # 0 * -inf would be nan.
        state[WEIGHTED] = mass.mul_(logits.masked_fill(logits == NOTHING, 0.0)).sum(1)
    return state


def gradient_(
    strip: torch.Tensor, columns: torch.Tensor, lse: torch.Tensor, scale: torch.Tensor
) -> None:
    """See ``kernels.vocabulary_loss.op.gradient_``."""
    if strip.numel() == 0:
        return
    factor = scale.expand(len(strip)).unsqueeze(1)
    hit = (columns >= 0).to(lse.dtype).neg().unsqueeze(1)
    index = columns.clamp(min=0).unsqueeze(1)
    for block in row_blocks(*strip.shape):
        wide = strip[block].to(lse.dtype)  # a view where the strip is in that dtype already
        wide.sub_(lse[block].unsqueeze(1)).exp_()
        wide.scatter_add_(1, index[block], hit[block]).mul_(factor[block])
        if wide.dtype != strip.dtype:
            strip[block] = wide
