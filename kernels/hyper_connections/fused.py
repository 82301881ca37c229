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
        made, lead = op.map_and_read(_flat(streams, 2), fn, terms, constants), streams.shape[:-2]
        ctx.save_for_backward(streams, fn, terms, made.z, made.norm)
        ctx.constants = constants
        ctx.set_materialize_grads(False)
        x, post, mix = (_unflat(t, lead) for t in made[:3])
        return x, streams.detach(), post, mix

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
        flat = _flat(streams, 2)
        tokens, n, dim = flat.shape
        of_fn = ctx.needs_input_grad[1]
        dstreams, dfn, dterms = op.map_and_read_backward(
            flat.new_zeros(tokens, dim) if dx is None else _flat(dx, 1),
            z.new_zeros(tokens, n) if dpost is None else _flat(dpost, 1),
            z.new_zeros(tokens, n, n) if dmix is None else _flat(dmix, 2),
            None if dheld is None else _flat(dheld, 2),
            flat, fn, terms, z, norm, ctx.constants, of_weight=of_fn,
        )  # fmt: skip
        return dstreams.view(streams.shape), dfn if of_fn else None, dterms, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return _unflat(op.merge(*_all_flat(*inputs)), inputs[0].shape[:-2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = ctx.saved_tensors
        found = op.merge_backward(_flat(grad, 2), *_all_flat(*inputs))
        return tuple(f.view(t.shape) for f, t in zip(found, inputs, strict=True))


def _flat(tensor: torch.Tensor, own: int) -> torch.Tensor:
    """With one leading dimension in place of all but the last ``own``."""
    return tensor.flatten(0, -1 - own)


def _unflat(tensor: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """With the leading dimensions back. Detached, which makes it no view to those who ask."""
    return tensor.unflatten(0, lead).detach()


def _all_flat(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _flat(streams, 2), _flat(out, 1), _flat(post, 1), _flat(mix, 2)


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
    return _MapAndRead.apply(streams, fn, terms, constants)


def merge(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """See ``op.merge``, with leading dimensions (...) for T; keeps its inputs."""
    return _Merge.apply(streams, out, post, mix)
