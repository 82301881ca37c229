"""Read a mixer's input from the residual streams."""

import torch

from kernels.precision import accumulation_dtype
from kernels.replay import replay


def read_reference(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The definition; autograd keeps its inputs, but works on all products in float32."""
    wide = accumulation_dtype(streams.dtype)
    return (streams * pre.to(wide).unsqueeze(-1)).sum(-2).to(streams.dtype)


def read(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """``sum_i pre_i * streams_i``, in full precision and rounded once.

    Equals the definition to the bit: the products are taken a block of tokens at a time.
    Source: mHC, arXiv 2512.24880, equation 3.

    Args:
        streams: (..., n, D).
        pre: (..., n) float32.

    Returns:
        (..., D) in the dtype of ``streams``.
    """
    return replay(read_reference, streams.dim() - 2, (streams, pre))
