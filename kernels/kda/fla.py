"""KDA in flash-linear-attention's Triton kernels (fla-core 0.6.0); CUDA only.

Where it finds TileLang and nvcc, fla runs one of its backward kernels in TileLang instead.
"""

import torch

from kernels.fla_package import refuse_other_than, switch_off_flash_kda
from kernels.kda.inputs import check_arguments, check_state
from kernels.kda.one_form import use_one_form
from kernels.packed import bound_tensors
from kernels.tuned import fla as tuned

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
    """See ``kernels.kda.chunked.kda_piece``: the same function up to rounding, as for ``kda``.

    A document that is cut goes into a call of its own: the kernels hold a state for each document
    of a call that takes or returns states, and there may be thousands of short ones.
    """
    check_arguments(q, k, v, raw_gate, beta, A_log, dt_bias, lengths, lower_bound)
    check_state(state, q, v)
    refuse_other_than(q=q, k=k, v=v)
    check_width(q.shape[-1])
    switch_off_flash_kda()
    use_one_form()
    tuned.use()
    calls = split_calls(lengths, state is not None, carries)
    whole, tokens = (q, k, v, raw_gate, beta), [sum(call) for call in calls]
    # A split of one part would cost a copy of every gradient.
    rows = [(x,) if len(calls) == 1 else x.split(tokens) for x in whole]
    last, outputs, left = len(calls) - 1, [], None
    for number, call in enumerate(calls):
        out, left = _chunk_kda(
            [x[number] for x in rows],
            A_log,
            dt_bias,
            call,
            state if number == 0 else None,
            lower_bound,
            carries and number == last,
        )
        outputs.append(out)
    return outputs[0] if last == 0 else torch.cat(outputs), left


def split_calls(lengths: tuple[int, ...], continued: bool, carries: bool) -> list[tuple[int, ...]]:
    """Documents that go into one call each: the one that goes on from a state, those that are
    whole, the one that hands on a state. Without states everything is one call."""
    if len(lengths) == 1:
        return [lengths]
    first, last = int(continued), len(lengths) - int(carries)
    return [part for part in (lengths[:first], lengths[first:last], lengths[last:]) if part]


def _chunk_kda(
    rows: list[torch.Tensor],
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lengths: tuple[int, ...],
    state: torch.Tensor | None,
    lower_bound: float,
    carries: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One call; ``rows`` are q, k, v, raw_gate and beta. Where there are states, ``lengths`` is of
    one document."""
    from fla.ops.kda import chunk_kda

    q, k, v, raw_gate, beta = rows
    device_bounds, host_bounds = bound_tensors(lengths, q.device)
    out, left = chunk_kda(
        q=q.unsqueeze(0),
        k=k.unsqueeze(0),
        v=v.unsqueeze(0),
        g=raw_gate.unsqueeze(0),
        # In a lower precision the kernels would round beta k and beta v once more.
        beta=beta.float().unsqueeze(0),
        A_log=A_log,
        dt_bias=dt_bias,
        scale=q.shape[-1] ** -0.5,
        initial_state=None if state is None else state.unsqueeze(0),
        output_final_state=carries,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        cu_seqlens=device_bounds,
        cu_seqlens_cpu=host_bounds,
    )
    return out.squeeze(0), left.squeeze(0) if carries else None
