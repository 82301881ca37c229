"""KDA token by token: the definition, for tests. Slow, and autograd keeps every state."""

import torch

from kernels.kda.inputs import NORM_EPS, check_arguments, steepness
from kernels.packed import bounds
from kernels.precision import accumulation_dtype


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
    """See ``kernels.kda.chunked.kda``: the same function, one token after another."""
    check_arguments(q, k, v, raw_gate, beta, A_log, dt_bias, lengths, lower_bound)
    dtype = accumulation_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        q, k = unit(q.to(dtype)) * q.shape[-1] ** -0.5, unit(k.to(dtype))
        shifted = raw_gate.to(dtype) + dt_bias.to(dtype).view(q.shape[1:])
        gate = lower_bound * torch.sigmoid(steepness(A_log, dtype).unsqueeze(-1) * shifted)
        rows = (x.to(dtype).unbind() for x in (q, k, v, gate.exp(), beta))
        starts = set(bounds(lengths))
        state = q.new_zeros(*q.shape[1:], v.shape[-1])
        outputs = []
        for t, (q_t, k_t, v_t, decay, beta_t) in enumerate(zip(*rows, strict=True)):
            if t in starts:
                state = torch.zeros_like(state)
            state = decay.unsqueeze(-1) * state
            error = v_t - torch.einsum("hkv,hk->hv", state, k_t)
            state = state + torch.einsum("hk,hv->hkv", k_t, beta_t.unsqueeze(-1) * error)
            outputs.append(torch.einsum("hkv,hk->hv", state, q_t))
        return torch.stack(outputs).to(v.dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
