"""One site of the streams with gradients: what is kept for backward are the streams themselves."""

from typing import Any

import torch

from kernels.hyper_connections import op
from kernels.hyper_connections.naive import Constants


class _MapAndRead(torch.autograd.Function):
    """Hands the streams on, so that its backward adds to their gradient what writing sends back.

    Autograd would do that in a pass of its own over three tensors of that size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        streams: torch.Tensor,
        fn: torch.Tensor,
        terms: torch.Tensor,
        constants: Constants,
    ) -> tuple[torch.Tensor, ...]:
        made = op.map_and_read(streams, fn, terms, constants)
        ctx.save_for_backward(streams, fn, terms, made.z, made.norm)
        ctx.constants = constants
        ctx.set_materialize_grads(False)
        return made.x, streams.view_as(streams), made.post, made.mix

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,
        dx: torch.Tensor | None,
        dheld: torch.Tensor | None,
        dpost: torch.Tensor | None,
        dmix: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        streams, fn, terms, z, norm = ctx.saved_tensors
        tokens, n, dim = streams.shape
        dx = streams.new_zeros(tokens, dim) if dx is None else dx
        dpost = z.new_zeros(tokens, n) if dpost is None else dpost
        dmix = z.new_zeros(tokens, n, n) if dmix is None else dmix
        of_fn = ctx.needs_input_grad[1]
        dstreams, dfn, dterms = op.map_and_read_backward(
            dx, dpost, dmix, dheld, streams, fn, terms, z, norm, ctx.constants, of_weight=of_fn
        )
        return dstreams, dfn if of_fn else None, dterms, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return op.merge(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return op.merge_backward(grad, *ctx.saved_tensors)


def map_and_read(
    streams: torch.Tensor, fn: torch.Tensor, terms: torch.Tensor, constants: Constants
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``op.map_and_read``; keeps its inputs, ``z`` and ``norm``.

    Args:
        streams: (..., n, D).
        fn: (n^2 + 2n, n * D).
        terms: (2, n^2 + 2n).
        constants: of the model.

    Returns:
        A mixer's input (..., D); the streams, for ``merge``: whatever else uses them costs a pass
        over their gradient; post (..., n); mix (..., n, n).
    """
    lead = streams.shape[:-2]
    made = _MapAndRead.apply(streams.flatten(0, -3), fn, terms, constants)
    x, held, post, mix = (t.unflatten(0, lead) for t in made)
    return x, held, post, mix


def merge(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """See ``op.merge``, with leading dimensions (...) for T; keeps its inputs."""
    lead = streams.shape[:-2]
    flat = (t.flatten(0, len(lead) - 1) for t in (streams, out, post, mix))
    return _Merge.apply(*flat).unflatten(0, lead)
