"""KDA in flash-linear-attention's Triton kernels (fla-core 0.6.0); CUDA only.

Where it finds TileLang and nvcc, fla runs one of its backward kernels in TileLang instead.
"""

import torch

from kernels.fla_package import refuse_other_than, switch_off_flash_kda
from kernels.kda.inputs import check_arguments
from kernels.packed import bound_tensors

NARROWEST, WIDEST = 16, 256
"""Widths of q and k per head that the kernels' matrix products take."""


def check_width(width: int) -> None:
    """Raise ValueError unless the kernels take heads of this width."""
    if not NARROWEST <= width <= WIDEST:
        raise ValueError(
            f"model.kda_head_dim: {width} is no width that fla's KDA kernels take; legal: "
            f"{NARROWEST} to {WIDEST}, or model.kda_kernel 'reference'"
        )


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lengths: tuple[int, ...],
    *,
    lower_bound: float,
) -> torch.Tensor:
    """See ``kernels.kda.chunked.kda``: the same function up to rounding.

    States are float32 while they pass through a document and are rounded to q's dtype where outputs
    read them; products of float32 inputs are taken in TF32. ``beta`` and ``raw_gate`` may have
    float dtypes of their own. All seven tensors get gradients, in their own dtypes; those of A_log
    and dt_bias are summed in float32.
    """
    check_arguments(q, k, v, raw_gate, beta, A_log, dt_bias, lengths, lower_bound)
    refuse_other_than(q=q, k=k, v=v)
    check_width(q.shape[-1])
    switch_off_flash_kda()
    from fla.ops.kda import chunk_kda

    device_bounds, host_bounds = bound_tensors(lengths, q.device)
    out, _ = chunk_kda(
        q=q.unsqueeze(0),
        k=k.unsqueeze(0),
        v=v.unsqueeze(0),
        g=raw_gate.unsqueeze(0),
        # In a lower precision the kernels would round beta k and beta v once more.
        beta=beta.float().unsqueeze(0),
        A_log=A_log,
        dt_bias=dt_bias,
        scale=q.shape[-1] ** -0.5,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        cu_seqlens=device_bounds,
        cu_seqlens_cpu=host_bounds,
    )
    return out.squeeze(0)
