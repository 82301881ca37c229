"""Row-wise functions that keep nothing but their inputs and run again in backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.precision import accumulation_dtype
from kernels.row_blocks import row_blocks


class _Replay(torch.autograd.Function):
    """Arguments: the function, dimensions of a row's place, tensors with rows, then all tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., torch.Tensor],
        leading: int,
        count: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.compute, ctx.leading, ctx.count = compute, leading, count
        flat = _flat(tensors[:count], leading)
        blocks, shared = _blocks(flat), tensors[count:]
        if len(blocks) == 1:
            return compute(*tensors)
        first = compute(*(t[blocks[0]] for t in flat), *shared)
        out = first.new_empty(*tensors[0].shape[:leading], *first.shape[1:])
        rows = out.flatten(0, leading - 1)
        rows[blocks[0]] = first
        for block in blocks[1:]:
            rows[block] = compute(*(t[block] for t in flat), *shared)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[3:]
        flat = _flat(tensors[: ctx.count], ctx.leading)
        blocks = _blocks(flat)
        if len(blocks) == 1:
            return *(None,) * 3, *gradients(ctx.compute, tensors, wanted, grad)
        (pulls,) = _flat([grad], ctx.leading)
        sums = _Sums(tensors, wanted, ctx.count, ctx.leading)
        for block in blocks:
            parts = [*(t[block] for t in flat), *tensors[ctx.count :]]
            sums.add(block, gradients(ctx.compute, parts, wanted, pulls[block]))
        return *(None,) * 3, *sums.results()


class _Sums:
    """Gradients put together from blocks: rows side by side, shared tensors summed."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[bool], count: int, leading: int
    ) -> None:
        self._tensors = tensors
        self._totals = [
            None if not asked
            else torch.empty(t.shape, dtype=t.dtype, device=t.device) if i < count
            else torch.zeros_like(t, dtype=accumulation_dtype(t.dtype))
            for i, (t, asked) in enumerate(zip(tensors, wanted, strict=True))
        ]  # fmt: skip
        self._count, self._leading = count, leading

    def add(self, block: slice, parts: Sequence[torch.Tensor | None]) -> None:
        for i, (total, part) in enumerate(zip(self._totals, parts, strict=True)):
            if total is None or part is None:
                continue
            if i < self._count:
                total.flatten(0, self._leading - 1)[block] = part
            else:
                total += part

    def results(self) -> list[torch.Tensor | None]:
        pairs = zip(self._totals, self._tensors, strict=True)
        return [None if total is None else total.to(t.dtype) for total, t in pairs]


def _flat(tensors: Sequence[torch.Tensor], leading: int) -> list[torch.Tensor]:
    return [t.flatten(0, leading - 1) for t in tensors]


def _blocks(rows: Sequence[torch.Tensor]) -> list[slice]:
    width = max(t.shape[1:].numel() for t in rows)
    return list(row_blocks(len(rows[0]), width))


def gradients(
    compute: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    grad: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Run ``compute`` with a graph; the gradients of the ``wanted`` tensors, None for the rest."""
    leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    with torch.enable_grad():
        out = compute(*leaves)
    found = iter(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad))
    return [next(found) if w else None for w in wanted]


def replay(
    compute: Callable[..., torch.Tensor],
    leading: int,
    rows: Sequence[torch.Tensor],
    shared: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """``compute(*rows, *shared)``, with its inputs alone kept for backward.

    Forward and backward run a block of rows at a time (``kernels.row_blocks``), so intermediates
    never exist for all rows. Outputs and gradients of ``rows`` are those of ``compute`` to the bit
    where its arithmetic on a row does not depend on the number of rows. Gradients of ``shared`` are
    equal to the bit within one block; further blocks add up theirs in float32.

    Args:
        compute: every row of its result depends on the same row of ``rows``, and on ``shared``. It
            is given the tensors as they are, or blocks of their rows with one leading dimension.
        leading: leading dimensions that say which row, the same in all of ``rows``; at least 1.
        rows: tensors that have rows.
        shared: tensors that all rows meet, such as weights.
    """
    return _Replay.apply(compute, leading, len(rows), *rows, *shared)
