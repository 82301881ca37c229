"""One rank's tokens meet one rank's compute shard, a strip at a time; the strip is not kept."""

from collections.abc import Iterator

import torch

from components.vocabulary.strips import strip_buffer
from kernels.products import add_product, multiply
from kernels.vocabulary_loss.op import fold_strip, gradient_


def _strips(
    x: torch.Tensor, w: torch.Tensor, rows: int
) -> Iterator[tuple[slice, torch.Tensor]]:  # fmt: skip
    """Logits ``x @ w.T``, at most ``rows`` rows at a time, all in the same memory."""
    if len(w) == 0:
        return
    buffer = strip_buffer(min(rows, len(x)), len(w), x)
    for begin in range(0, len(x), rows):
        some = slice(begin, min(begin + rows, len(x)))
        strip = buffer[: some.stop - begin]
        multiply(strip, x[some], w.t())
        yield some, strip


def statistics(
    x: torch.Tensor, w: torch.Tensor, columns: torch.Tensor, state: torch.Tensor, rows: int
) -> None:
    """Add what the logits ``x @ w.T`` say to ``state``.

    Args:
        x: (n, H).
        w: (v, H).
        columns: int64 (n,), targets as rows of w, or -1.
        state: (4, n); see ``kernels.vocabulary_loss.state``.
        rows: of a strip.
    """
    for some, strip in _strips(x, w, rows):
        part = state[:, some].contiguous()
        fold_strip(strip, columns[some], part)
        state[:, some] = part


def gradients(
    x: torch.Tensor,
    w: torch.Tensor,
    columns: torch.Tensor,
    lse: torch.Tensor,
    scale: torch.Tensor,
    dx: torch.Tensor,
    dw: torch.Tensor | None,
    rows: int,
    *,
    first: bool,
) -> None:
    """The logits once more, and from them what this meeting adds to dX and dW.

    Args:
        x, w, columns: as for ``statistics``.
        lse: (n,), normalisers over the whole vocabulary.
        scale: (n,), factors on -log p.
        dx: (n, H): overwritten if ``first``, else added to.
        dw: (v, H), added to; None: not wanted.
        rows: of a strip.
    """
    if first and len(w) == 0:
        dx.zero_()
    write = multiply if first else add_product
    for some, strip in _strips(x, w, rows):
        gradient_(strip, columns[some], lse[some], scale[some])
        write(dx[some], strip, w)
        if dw is not None:
            add_product(dw, strip.t(), x[some])
