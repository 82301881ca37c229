"""What is known about rows of logits when only some of their columns have been seen.

A *state* is a tensor (3 or 4, rows) in ``accumulation_dtype`` of the logits. Its rows are the
largest logit m so far, ``z = sum exp(Y - m)``, the target's logit y (0 until its column was seen)
and, where the entropy is wanted, ``sum exp(Y - m) * Y``.
"""

from collections.abc import Sequence

import torch

LARGEST, MASS, TARGET, WEIGHTED = range(4)
NOTHING = float("-inf")


def new_state(
    rows: int, *, entropy: bool, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The state of ``rows`` rows of which no column has been seen; with ``entropy`` it has four
    numbers per row instead of three."""
    state = torch.zeros(4 if entropy else 3, rows, dtype=dtype, device=device)
    state[LARGEST] = NOTHING
    return state


def merge(states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The state of all columns, from (parts, 3 or 4, rows) states of disjoint ones.

    Equal to the bit wherever it is computed: the parts are added up in their order.
    """
    if not isinstance(states, torch.Tensor):
        states = torch.stack(tuple(states))
    largest = states[:, LARGEST].amax(0)
    # A part without a finite logit has mass 0, but -inf - -inf would make it nan.
    factor = (states[:, LARGEST] - finite_or_zero(largest)).exp_()
    merged = [largest, (states[:, MASS] * factor).sum(0), states[:, TARGET].sum(0)]
    if states.shape[1] > WEIGHTED:
        merged.append((states[:, WEIGHTED] * factor).sum(0))
    return torch.stack(merged)


def finite_or_zero(largest: torch.Tensor) -> torch.Tensor:
    """``largest`` with -inf replaced by 0, a shift under which exp(-inf - shift) is 0."""
    return torch.where(largest == NOTHING, 0.0, largest)


def normaliser(state: torch.Tensor) -> torch.Tensor:
    """``log sum exp(Y)`` over all columns, (rows,)."""
    return state[LARGEST] + state[MASS].log()


def log_probability(state: torch.Tensor) -> torch.Tensor:
    """Logarithm of the target's softmax, (rows,); nan, as torch's, where every logit is -inf."""
    return state[TARGET] - normaliser(state)


def entropy(state: torch.Tensor) -> torch.Tensor:
    """``-sum p log p`` of the softmax, (rows,); the state must have four rows."""
    return normaliser(state) - state[WEIGHTED] / state[MASS]
