"""KDA token by token: the definition, for tests. Slow, and autograd keeps every state."""

import torch

from kernels.kda.inputs import NORM_EPS, check_arguments, check_state, steepness
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
    arguments = q, k, v, raw_gate, beta, A_log, dt_bias, lengths
    return kda_piece(*arguments, None, lower_bound=lower_bound)[0]


def kda_piece(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_gate: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lengths: tuple[int, ...],
    state: torch.Tensor | None,
    *,
    lower_bound: float,
    carries: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``kernels.kda.chunked.kda_piece``: the same function, one token after another."""
    check_arguments(q, k, v, raw_gate, beta, A_log, dt_bias, lengths, lower_bound)
    check_state(state, q, v)
    dtype = accumulation_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        q, k = unit(q.to(dtype)) * q.shape[-1] ** -0.5, unit(k.to(dtype))
        shifted = raw_gate.to(dtype) + dt_bias.to(dtype).view(q.shape[1:])
        gate = lower_bound * torch.sigmoid(steepness(A_log, dtype).unsqueeze(-1) * shifted)
        rows = (x.to(dtype).unbind() for x in (q, k, v, gate.exp(), beta))
        none = q.new_zeros(*q.shape[1:], v.shape[-1])
        starts = set(bounds(lengths)[0 if state is None else 1 :])
        outputs = []
        for t, (q_t, k_t, v_t, decay, beta_t) in enumerate(zip(*rows, strict=True)):
            if state is None or t in starts:
                state = none
            state = decay.unsqueeze(-1) * state
            error = v_t - torch.einsum("hkv,hk->hv", state, k_t)
            state = state + torch.einsum("hk,hv->hkv", k_t, beta_t.unsqueeze(-1) * error)
            outputs.append(torch.einsum("hkv,hk->hv", state, q_t))
        return torch.stack(outputs).to(v.dtype), state if carries else None


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
