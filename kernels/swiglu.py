"""SwiGLU with limits on its two inputs (GLM-5.3-Flash's ``swiglu_limit``)."""

from typing import Any

import torch
import torch.nn.functional as F


def clamped_swiglu_reference(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``, as autograd would run it."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class _ClampedSwiglu(torch.autograd.Function):
    """Keeps gate and up only; autograd would also keep both clamped copies and the activation."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        return clamped_swiglu_reference(gate, up, limit)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = clamped_swiglu_reference(gate, up, ctx.limit)
        return *torch.autograd.grad(out, (gate, up), grad), None


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``; gate has no lower limit.

    Args:
        gate, up: (..., F), the same shape and dtype.
        limit: above 0. No gradient passes where an input is beyond it.
    """
    return _ClampedSwiglu.apply(gate, up, limit)
