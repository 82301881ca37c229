"""Random arguments of KDA, and a run of one of its forms with all gradients."""

from collections.abc import Callable

import torch

NAMES = ("q", "k", "v", "raw_gate", "beta", "A_log", "dt_bias")
BOUND = -5.0

Kda = Callable[..., torch.Tensor]


def inputs(
    lengths: tuple[int, ...],
    heads: int = 2,
    dk: int = 8,
    dv: int = 6,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[torch.Tensor]:
    """The seven tensors; A_log and dt_bias in float32 where ``dtype`` is lower."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(lengths)
    rows = [normal(tokens, heads, width) for width in (dk, dk, dv, dk)]
    rows.append(normal(tokens, heads).sigmoid())
    shared = [0.5 * normal(heads), normal(heads * dk) - 2]
    wide = torch.promote_types(dtype, torch.float32)
    return [*(x.to(dtype) for x in rows), *(x.to(wide) for x in shared)]


def run(
    kda: Kda,
    tensors: list[torch.Tensor],
    lengths: tuple[int, ...],
    bound: float = BOUND,
    upstream: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and the gradient of each tensor for a random (or the given) upstream one."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = kda(*leaves, lengths, lower_bound=bound)
    if upstream is None:
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return out.detach(), list(torch.autograd.grad(out, leaves, upstream.to(out)))
