"""SwiGLU with limits on its two inputs (GLM-5.3-Flash's ``swiglu_limit``)."""

from functools import partial

import torch
import torch.nn.functional as F

from kernels.replay import replay


def clamped_swiglu_reference(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """The definition; autograd keeps both inputs, both clamped copies and the activation."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``; gate has no lower limit.

    Equals the definition to the bit, and keeps gate and up alone.

    Args:
        gate, up: (..., F), the same shape and dtype.
        limit: above 0. No gradient passes where an input is beyond it.
    """
    compute = partial(clamped_swiglu_reference, limit=limit)
    return replay(compute, gate.dim() - 1, (gate, up))
