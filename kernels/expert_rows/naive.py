"""Moving, weighing and summing experts' rows in plain torch: the definitions of ``op``."""

import torch
import torch.nn.functional as F

from kernels.precision import accumulation_dtype
from kernels.row_blocks import row_blocks


def gather(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """See ``kernels.expert_rows.op.gather``."""
    torch.index_select(rows, 0, index, out=out)


def scatter(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """See ``kernels.expert_rows.op.scatter``."""
    out.index_copy_(0, index, rows)


def weigh_(rows: torch.Tensor, weights: torch.Tensor) -> None:
    """See ``kernels.expert_rows.op.weigh_``."""
    wide = accumulation_dtype(rows.dtype)
    for block in row_blocks(*rows.shape):
        rows[block] = rows[block].to(wide) * weights[block, None].to(wide)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """See ``kernels.expert_rows.op.swiglu``."""
    for block in row_blocks(*gate.shape):
        gated, limited = F.silu(gate[block].clamp(max=limit)), up[block].clamp(-limit, limit)
        torch.mul(gated, limited, out=out[block])


def swiglu_gradients_(
    gate: torch.Tensor,
    up: torch.Tensor,
    back: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
    dots: torch.Tensor,
) -> None:
    """See ``kernels.expert_rows.op.swiglu_gradients_``. Rounds where autograd would."""
    wide = dots.dtype
    for block in row_blocks(*gate.shape):
        g, u = gate[block].clamp(max=limit), up[block].clamp(-limit, limit)
        gated, pull = F.silu(g), back[block].to(wide)
        hidden = gated * u
        dots[block] = (hidden.to(wide) * pull).sum(1)
        pull = (pull * weights[block, None].to(wide)).to(back.dtype)
        of_gate = torch.ops.aten.silu_backward(pull * u, g)
        gate[block] = of_gate.masked_fill_(gate[block] > limit, 0)
        up[block] = (pull * gated).masked_fill_(up[block].abs() > limit, 0)
        back[block] = hidden


def sum_places(
    rows: torch.Tensor,
    place: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    *,
    rounded: bool,
) -> None:
    """See ``kernels.expert_rows.op.sum_places``."""
    wide = accumulation_dtype(rows.dtype)
    for block in row_blocks(*out.shape):
        total = torch.zeros(out[block].shape, dtype=wide, device=out.device)
        for k in range(place.shape[1]):
            picked = rows[place[block, k]].to(wide)
            if weights is not None and not rounded:
                total.addcmul_(picked, weights[block, k, None].to(wide))
                continue
            if weights is not None:
                picked = picked * weights[block, k, None].to(wide)
            total += picked.to(rows.dtype).to(wide)
        out[block] = total
