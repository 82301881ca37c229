"""Write a mixer's output back into the residual streams, and mix them."""

from typing import Any

import torch

from kernels.precision import accumulation_dtype


def merge_reference(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """The definition, as autograd would run it; see ``merge``."""
    post, mix = post.to(streams.dtype), mix.to(streams.dtype)
    return post.unsqueeze(-1) * out.unsqueeze(-2) + mix.transpose(-1, -2) @ streams


class _Merge(torch.autograd.Function):
    """One stream after the other: as many small matrix products as tokens would take far longer."""

    @staticmethod
    def forward(
        ctx: Any, streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(streams, out, post, mix)
        # Rounded to the streams' dtype first, as the published model does.
        rounded = mix.to(streams.dtype)
        total = torch.zeros_like(streams, dtype=accumulation_dtype(streams.dtype))
        for i in range(streams.shape[-2]):
            total.addcmul_(rounded[..., i, :, None], streams[..., i, None, :])
        return (post.to(out.dtype).unsqueeze(-1) * out.unsqueeze(-2)).add_(total.to(out.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        streams, out, post, mix = ctx.saved_tensors
        wide = grad.to(accumulation_dtype(grad.dtype))
        post_w, mix_w = (t.to(streams.dtype).to(wide.dtype) for t in (post, mix))
        grad_streams, grad_mix = torch.empty_like(streams), torch.empty_like(mix)
        for i in range(streams.shape[-2]):
            grad_streams[..., i, :] = (mix_w[..., i, :, None] * wide).sum(-2).to(streams.dtype)
            grad_mix[..., i, :] = (streams[..., i, None, :] * wide).sum(-1).to(mix.dtype)
        grad_out = (post_w.unsqueeze(-1) * wide).sum(-2).to(out.dtype)
        grad_post = (out.unsqueeze(-2) * wide).sum(-1).to(post.dtype)
        return grad_streams, grad_out, grad_post, grad_mix


def merge(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """``new_j = post_j * out + sum_i mix_ij * streams_i``.

    Both weights are rounded to the streams' dtype first. Source: mHC, arXiv 2512.24880, equation 3.

    Args:
        streams: (..., n, D) as they were read.
        out: (..., D), the mixer's output, the dtype of ``streams``.
        post: (..., n) float32.
        mix: (..., n incoming, n outgoing) float32.

    Returns:
        (..., n, D).
    """
    return _Merge.apply(streams, out, post, mix)
