"""RMS norms that round where GLM-5.3-Flash's do: the definitions, and forms that keep their inputs.

A ``*_reference`` is what autograd would run. It keeps the normalised values for the weight's
gradient and, where torch has no fused norm, the input in float32 as well. The other forms keep the
inputs and normalise again in backward, a block of rows at a time.
"""

from functools import partial

import torch
import torch.nn.functional as F

from kernels.precision import accumulation_dtype
from kernels.replay import replay


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition; see ``rms_norm``."""
    return F.rms_norm(x, weight.shape, None, eps) * weight


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalised in float32, rounded to the dtype of ``x``, then times ``weight``.

    Equals the definition to the bit, but for the weight's gradient beyond one block of rows.

    Args:
        x: (..., width), any float dtype.
        weight: (width,).
        eps: added to the mean square.
    """
    return replay(partial(rms_norm_reference, eps=eps), x.dim() - 1, (x,), (weight,))


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The definition; see ``gated_rms_norm``."""
    wide = accumulation_dtype(x.dtype)
    normed = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    return (normed * gate.to(wide).sigmoid()).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``rms(x) * weight * sigmoid(gate)`` over the last axis, in float32, rounded once at the end.

    Equals the definition to the bit, but for the weight's gradient beyond one block of rows.

    Args:
        x, gate: (..., width), one float dtype.
        weight: (width,).
        eps: added to the mean square.

    Returns:
        The shape and dtype of ``x``.
    """
    compute = partial(gated_rms_norm_reference, eps=eps)
    return replay(compute, x.dim() - 1, (x, gate), (weight,))
