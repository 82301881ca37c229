"""Read a mixer's input from the residual streams."""

from typing import Any

import torch

from kernels.hyper_connections.merge import MadeOf, by_token, rows_of
from kernels.precision import accumulation_dtype
from kernels.replay import gradients, replay
from kernels.row_blocks import row_blocks


def read_reference(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The definition; autograd keeps its inputs, but works on all products in float32."""
    wide = accumulation_dtype(streams.dtype)
    return (streams * pre.to(wide).unsqueeze(-1)).sum(-2).to(streams.dtype)


class _Read(torch.autograd.Function):
    """Of streams that are merged again in backward."""

    @staticmethod
    def forward(
        ctx: Any, streams: torch.Tensor, pre: torch.Tensor, *made_of: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(pre, *made_of)
        return read(streams, pre)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pre, *made_of = ctx.saved_tensors
        grads = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) if wanted else None
            for tensor, wanted in zip((made_of[0], pre), ctx.needs_input_grad, strict=False)
        ]
        wholes = [None if whole is None else whole.flatten(0, pre.dim() - 2) for whole in grads]
        source, (weights, pulls) = by_token(*made_of), (t.flatten(0, -2) for t in (pre, grad))
        for block in row_blocks(len(weights), source[0].shape[1:].numel()):
            rows, wanted = (rows_of(source, block), weights[block]), ctx.needs_input_grad[:2]
            found = gradients(read_reference, rows, wanted, pulls[block])
            for whole, piece in zip(wholes, found, strict=True):
                if whole is not None and piece is not None:
                    whole[block] = piece
        return *grads, *(None for _ in made_of)


def read(streams: torch.Tensor, pre: torch.Tensor, made_of: MadeOf = ()) -> torch.Tensor:
    """``sum_i pre_i * streams_i``, in full precision and rounded once.

    Equals the definition to the bit: the products are taken a block of tokens at a time.
    Source: mHC, arXiv 2512.24880, equation 3.

    Args:
        streams: (..., n, D).
        pre: (..., n) float32.
        made_of: kept instead of ``streams``.

    Returns:
        (..., D) in the dtype of ``streams``.
    """
    if made_of:
        return _Read.apply(streams, pre, *made_of)
    return replay(read_reference, streams.dim() - 2, (streams, pre))
