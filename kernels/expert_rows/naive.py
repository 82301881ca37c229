"""Moving, weighing and summing experts' rows in plain torch: the definitions of ``op``."""

import torch

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


def dot_and_weigh_(
    other: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, dots: torch.Tensor
) -> None:
    """See ``kernels.expert_rows.op.dot_and_weigh_``."""
    wide = dots.dtype
    for block in row_blocks(*rows.shape):
        part = rows[block].to(wide)
        dots[block] = (other[block].to(wide) * part).sum(1)
        rows[block] = part * weights[block, None].to(wide)


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
            total += picked.to(rows.dtype).to(wide) if rounded else picked
            if rounded:
                total = total.to(rows.dtype).to(wide)
        out[block] = total
