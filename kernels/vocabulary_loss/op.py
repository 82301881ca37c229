"""Statistics and gradients of a strip of logits, on whatever device it is.

On a GPU in Triton, but for float64; else in plain torch.

A *strip* is (rows, v): the logits of some tokens for some columns of the vocabulary. Its columns
lie side by side in memory; rows may be further apart. ``columns`` says where in it each row's
target is, -1 where the target is no column of this strip.
"""

import torch

from kernels.precision import accumulation_dtype
from kernels.vocabulary_loss import naive


def fold_strip(strip: torch.Tensor, columns: torch.Tensor, state: torch.Tensor) -> None:
    """Add what the columns of ``strip`` say to ``state``, in place.

    Logits of -inf weigh nothing, also where a row has no other; nan stays nan; v may be 0.

    Args:
        strip: (rows, v), any float dtype.
        columns: int64 (rows,), in [-1, v).
        state: (3 or 4, rows) in ``accumulation_dtype``, contiguous; see ``state``.

    Raises:
        ValueError: shapes, dtypes or strides are others.
    """
    _check(strip, columns)
    wide = accumulation_dtype(strip.dtype)
    if state.dtype != wide or state.shape not in ((3, len(strip)), (4, len(strip))):
        raise ValueError(
            f"state is {state.dtype} {tuple(state.shape)}; legal: {wide} of shape "
            f"(3 or 4, {len(strip)})"
        )
    if not state.is_contiguous():
        raise ValueError("state is not contiguous")
    if strip.is_cuda and wide == torch.float32:
        from kernels.vocabulary_loss import triton_

        triton_.fold_strip(strip, columns, state)
    else:
        naive.fold_strip(strip, columns, state)


def gradient_(
    strip: torch.Tensor, columns: torch.Tensor, lse: torch.Tensor, scale: torch.Tensor
) -> None:
    """Replace logits by ``(softmax - onehot(target)) * scale``, in place, rounded once.

    That is the gradient of ``-scale * log p(target)``.

    Args:
        strip: (rows, v), any float dtype.
        columns: int64 (rows,), in [-1, v).
        lse: (rows,) in ``accumulation_dtype``, contiguous: ``state.normaliser``.
        scale: (), (1,) or (rows,) in ``accumulation_dtype``, contiguous.

    Raises:
        ValueError: shapes, dtypes or strides are others.
    """
    _check(strip, columns)
    wide, rows = accumulation_dtype(strip.dtype), len(strip)
    for name, value, legal in (
        ("lse", lse, [(rows,)]),
        ("scale", scale, [(), (1,), (rows,)]),
    ):
        if value.dtype != wide or tuple(value.shape) not in legal or not value.is_contiguous():
            raise ValueError(
                f"{name} is {value.dtype} {tuple(value.shape)}; legal: contiguous {wide} of shape "
                f"{' or '.join(map(str, legal))}"
            )
    if strip.is_cuda and wide == torch.float32:
        from kernels.vocabulary_loss import triton_

        triton_.gradient_(strip, columns, lse, scale)
    else:
        naive.gradient_(strip, columns, lse, scale)


def _check(strip: torch.Tensor, columns: torch.Tensor) -> None:
    if strip.dim() != 2 or not strip.is_floating_point():
        raise ValueError(
            f"strip is {strip.dtype} {tuple(strip.shape)}; legal: floats of shape (rows, v)"
        )
    if strip.shape[1] > 1 and strip.stride(1) != 1:
        raise ValueError("the columns of a row of the strip do not lie side by side")
    if (
        columns.dtype != torch.int64
        or columns.shape != strip.shape[:1]
        or not columns.is_contiguous()
    ):
        raise ValueError(
            f"columns is {columns.dtype} {tuple(columns.shape)}; legal: contiguous torch.int64 of "
            f"shape ({len(strip)},)"
        )
