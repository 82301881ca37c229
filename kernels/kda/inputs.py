"""What every form of KDA asks of its arguments."""

import math

import torch

from kernels.packed import check_lengths
from kernels.precision import accumulation_dtype

LOWEST_BOUND = -5.0
"""Over 16 tokens a log decay of -5 each spans e^80, and float32 ends at e^88."""

NORM_EPS = 1e-6
"""Added to the sum of squares of q and of k before the root."""


def check_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lengths: tuple[int, ...],
    lower_bound: float,
) -> None:
    """Raise ValueError, which names what does not fit, unless the arguments fit together."""
    if not LOWEST_BOUND <= lower_bound < 0:
        raise ValueError(
            f"lower_bound (model.gate_lower_bound): {lower_bound}; legal: at least {LOWEST_BOUND} "
            "and below 0, because the decay over 16 tokens must fit float32"
        )
    tokens, heads, width = q.shape
    expected = {
        "k": (k, (tokens, heads, width)),
        "v": (v, (tokens, heads, v.shape[-1])),
        "raw_gate": (raw_gate, (tokens, heads, width)),
        "beta": (beta, (tokens, heads)),
        "A_log": (A_log, (heads,)),
        "dt_bias": (dt_bias, (heads * width,)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}; legal beside q of {tuple(q.shape)}: {shape}"
            )
    check_lengths(lengths, tokens)


def check_state(state: torch.Tensor | None, q: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError unless ``state`` is None or one that these q and v can go on from."""
    if state is None:
        return
    shape, dtype = (*q.shape[1:], v.shape[-1]), accumulation_dtype(q.dtype)
    if tuple(state.shape) != shape or state.dtype != dtype:
        raise ValueError(
            f"state: shape {tuple(state.shape)} of {state.dtype}; legal beside q of "
            f"{tuple(q.shape)} and v of {tuple(v.shape)}: {shape} of {dtype}, or None"
        )


def steepness(A_log: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp(A_log), kept finite: infinity times a gate or a gradient of 0 would be nan."""
    return A_log.to(dtype).clamp(max=math.log(torch.finfo(dtype).max) - 1).exp()
