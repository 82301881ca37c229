"""The short convolution in flash-linear-attention's Triton kernel; CUDA only."""

import torch

from kernels.fla_package import refuse_other_than
from kernels.packed import bound_tensors
from kernels.short_conv.naive import check_arguments
from kernels.tuned import fla as tuned


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, position: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    """See ``kernels.short_conv.naive.short_conv``, with ``position`` counted within ``lengths``.

    The sums and the SiLU are float32. Backward computes the sums again and rounds them to x's dtype
    before it takes the derivative of the SiLU. It holds C * K float32 numbers per started 64 tokens
    of a document: many short documents cost memory.
    """
    check_arguments(x, weight, position, lengths)
    refuse_other_than(x=x)
    tuned.use()
    from fla.modules.causal_conv1d import causal_conv1d

    device_bounds, host_bounds = bound_tensors(lengths, x.device)
    out, _ = causal_conv1d(
        x=x.unsqueeze(0),
        weight=weight.squeeze(1),
        activation="silu",
        cu_seqlens=device_bounds,
        cu_seqlens_cpu=host_bounds,
    )
    return out.squeeze(0)
