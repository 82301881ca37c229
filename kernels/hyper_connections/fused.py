"""One site of the streams with gradients: kept for backward are the streams, or what made them."""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.hyper_connections import op
from kernels.hyper_connections.merge import MadeOf
from kernels.hyper_connections.naive import Constants
from kernels.row_blocks import row_blocks

AGAIN = 2**26
"""Numbers of streams that the backward of ``merge`` merges again together."""


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
        *made_of: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        made, lead = op.map_and_read(_flat(streams, 2), fn, terms, constants), streams.shape[:-2]
        ctx.save_for_backward(fn, terms, made.z, made.norm, *(made_of or (streams,)))
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
        fn, terms, z, norm, *kept = ctx.saved_tensors
        flat = _streams_of(kept)
        tokens, n, dim = flat.shape
        of_fn = ctx.needs_input_grad[1]
        dstreams, dfn, dterms = op.map_and_read_backward(
            flat.new_zeros(tokens, dim) if dx is None else _flat(dx, 1),
            z.new_zeros(tokens, n) if dpost is None else _flat(dpost, 1),
            z.new_zeros(tokens, n, n) if dmix is None else _flat(dmix, 2),
            None if dheld is None else _flat(dheld, 2),
            flat, fn, terms, z, norm, ctx.constants, of_weight=of_fn,
        )  # fmt: skip
        # What streams were merged of begins with streams of the same shape.
        made_of = (None for _ in kept[1:] and kept)
        return dstreams.view(kept[0].shape), dfn if of_fn else None, dterms, None, *made_of


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        streams: torch.Tensor,
        out: torch.Tensor,
        post: torch.Tensor,
        mix: torch.Tensor,
        unread: bool,
        *made_of: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(out, post, mix, *(made_of or (streams,)))
        if unread:
            return streams.new_zeros(()).expand(streams.shape)
        return _unflat(op.merge(*_all_flat(streams, out, post, mix)), streams.shape[:-2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out, post, mix, *kept = ctx.saved_tensors
        inputs, rows = (kept[0], out, post, mix), _flat(grad, 2)
        _, *parts = _all_flat(*inputs)
        if len(kept) == 1:
            found = op.merge_backward(rows, _flat(kept[0], 2), *parts)
        else:
            found = _merge_backward_in_blocks(rows, kept, parts)
        grads = (f.view(t.shape) for f, t in zip(found, inputs, strict=True))
        return *grads, None, *(None for _ in kept[1:] and kept)


def _merge_backward_in_blocks(
    grad: torch.Tensor, made_of: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """``op.merge_backward`` of streams that are merged again, some at a time: at the end of a layer
    the gradients of its result and of its streams live beside everything that it keeps."""
    source = _all_flat(*made_of)
    wholes = tuple(torch.empty_like(t) for t in (grad, *parts))
    for block in row_blocks(len(grad), grad.shape[1:].numel(), AGAIN):
        streams = op.merge(*(t[block] for t in source))
        pieces = op.merge_backward(grad[block], streams, *(t[block] for t in parts))
        for whole, piece in zip(wholes, pieces, strict=True):
            whole[block] = piece
    return wholes


def _streams_of(kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """(T, n, D): streams that were kept, or merged again of what was."""
    if len(kept) == 1:
        return _flat(kept[0], 2)
    streams, out, post, mix = kept
    return op.merge(*_all_flat(streams, out, post, mix))


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
    streams: torch.Tensor,
    fn: torch.Tensor,
    terms: torch.Tensor,
    constants: Constants,
    made_of: MadeOf = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``op.map_and_read``; keeps its inputs, ``z`` and ``norm``.

    Args:
        streams: (..., n, D).
        fn: (n^2 + 2n, n * D).
        terms: (2, n^2 + 2n).
        constants: of the model.
        made_of: kept instead of ``streams``, which backward merges again, whole.

    Returns:
        A mixer's input (..., D); the streams, for ``merge``: whatever else uses them costs a pass
        over their gradient; post (..., n); mix (..., n, n).
    """
    return _MapAndRead.apply(streams, fn, terms, constants, *made_of)


def merge(
    streams: torch.Tensor,
    out: torch.Tensor,
    post: torch.Tensor,
    mix: torch.Tensor,
    made_of: MadeOf = (),
    unread: bool = False,
) -> torch.Tensor:
    """See ``op.merge``, with leading dimensions (...) for T; keeps its inputs.

    Args:
        streams, out, post, mix: as there.
        made_of: kept instead of ``streams``, which backward merges again, ``AGAIN`` at a time.
        unread: only the graph is wanted; returns zeros that take no memory.
    """
    return _Merge.apply(streams, out, post, mix, unread, *made_of)
