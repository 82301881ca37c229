"""One site of the streams as torch operators: in Triton on a GPU, but for float64; else as defined.

Bytes per token on a GPU, for S bytes of all streams and s of one of them, four streams:

========================= ==================== ========================= ==================
operator                  reads                writes                    4 x 4096 bfloat16
========================= ==================== ========================= ==================
map_and_read              2 S                  s                         72 KiB
merge                     S + s                S                         72 KiB
merge_backward            2 S + s              S + s                     112 KiB
map_and_read_backward     2 S + 2 s + S of     S                         144 KiB
                          what is held
========================= ==================== ========================= ==================

Reading needs all of a token's streams twice, as its weights depend on the last number of them, and
so does its backward: 32 KiB more each than if a token stayed on chip in between.

Nothing here is differentiable, nor waits for the device; ``fused`` has the gradients.
"""

import torch

from kernels.hyper_connections import naive
from kernels.hyper_connections.merge import merge_reference
from kernels.hyper_connections.naive import Constants, Read
from kernels.precision import accumulation_dtype

STREAMS = (2, 4)
"""Numbers of streams that the kernels take."""


def _on_kernels(streams: torch.Tensor) -> bool:
    return streams.is_cuda and streams.dtype != torch.float64 and len(streams) > 0


@torch.library.custom_op("hyper_connections::map_and_read", mutates_args=())
def _map_and_read(
    streams: torch.Tensor,
    fn: torch.Tensor,
    terms: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    constants = Constants(norm_eps, eps, iterations)
    if not _on_kernels(streams):
        made = naive.map_and_read(streams, fn, terms, constants)
        # No result of an operator may share another's memory.
        return made.x, made.post, made.mix.contiguous(), made.z, made.norm
    from kernels.hyper_connections import triton_maps, triton_project, triton_streams

    streams, fn = streams.contiguous(), fn.contiguous()
    z, norm = triton_project.project(streams, fn, norm_eps)
    pre, post, mix = triton_maps.maps(z, terms.contiguous(), streams.shape[1], constants)
    return triton_streams.read(streams, pre), post, mix, z, norm


@_map_and_read.register_fake
def _(
    streams: torch.Tensor,
    fn: torch.Tensor,
    terms: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, n, dim = streams.shape
    wide = accumulation_dtype(streams.dtype)
    return (
        streams.new_empty(tokens, dim),
        streams.new_empty(tokens, n, dtype=wide),
        streams.new_empty(tokens, n, n, dtype=wide),
        streams.new_empty(tokens, len(fn), dtype=wide),
        streams.new_empty(tokens, dtype=wide),
    )


@torch.library.custom_op("hyper_connections::map_and_read_backward", mutates_args=())
def _map_and_read_backward(
    dx: torch.Tensor,
    dpost: torch.Tensor,
    dmix: torch.Tensor,
    dheld: torch.Tensor | None,
    streams: torch.Tensor,
    fn: torch.Tensor,
    terms: torch.Tensor,
    z: torch.Tensor,
    norm: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    constants = Constants(norm_eps, eps, iterations)
    if not _on_kernels(streams):
        of_streams, dfn, of_terms = naive.map_and_read_backward(
            dx, dpost, dmix, dheld, streams, fn, terms, z, norm, constants
        )
        return of_streams, dfn if of_weight else fn.new_empty(0), of_terms
    from kernels.hyper_connections import triton_maps, triton_project, triton_streams

    dx, dpost, dmix, streams, fn, terms = (
        t.contiguous() for t in (dx, dpost, dmix, streams, fn, terms)
    )
    dheld = None if dheld is None else dheld.contiguous()
    dpre = triton_streams.read_backward(streams, dx)
    pre, dz, pull, dterms = triton_maps.gradients(
        dpre, dpost, dmix, z, norm, terms, fn.shape[1], constants
    )
    dstreams, dfn = triton_project.gradients(
        streams, dx, dheld, pre, dz, pull, fn, of_weight=of_weight
    )
    return dstreams, dfn, dterms


@_map_and_read_backward.register_fake
def _(
    dx: torch.Tensor,
    dpost: torch.Tensor,
    dmix: torch.Tensor,
    dheld: torch.Tensor | None,
    streams: torch.Tensor,
    fn: torch.Tensor,
    terms: torch.Tensor,
    z: torch.Tensor,
    norm: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dfn = fn.new_empty(fn.shape if of_weight else 0)
    return streams.new_empty(streams.shape), dfn, terms.new_empty(terms.shape)


def map_and_read(
    streams: torch.Tensor, fn: torch.Tensor, terms: torch.Tensor, constants: Constants
) -> Read:
    """Project the streams, make the three maps of that, and read a mixer's input.

    ``logits = rms(streams) @ fn.T * terms[0] + terms[1]`` are n of ``pre``, n of ``post``, and the
    mixing matrix row by row; ``x = sum_i (sigmoid(pre)_i + eps) * streams_i``, ``post`` twice its
    sigmoid, ``mix`` by Sinkhorn. Source: mHC, arXiv 2512.24880, equations 3 and 7-9.

    Args:
        streams: (T, n, D); the kernels take n in ``STREAMS``.
        fn: (n^2 + 2n, n * D), of the same dtype.
        terms: (2, n^2 + 2n) in ``accumulation_dtype``: factors, and what is added.
        constants: of the model.
    """
    return Read(*_map_and_read(streams, fn, terms, *constants))


def map_and_read_backward(
    dx: torch.Tensor,
    dpost: torch.Tensor,
    dmix: torch.Tensor,
    dheld: torch.Tensor | None,
    streams: torch.Tensor,
    fn: torch.Tensor,
    terms: torch.Tensor,
    z: torch.Tensor,
    norm: torch.Tensor,
    constants: Constants,
    *,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``map_and_read``.

    Args:
        dx: (T, D), dpost: (T, n), dmix: (T, n, n): gradients of its results.
        dheld: (T, n, D), to be added to the gradient of the streams; None: nothing.
        streams, fn, terms, constants: as given to it.
        z, norm: its results.
        of_weight: whether the gradient of ``fn`` is wanted.

    Returns:
        Gradients of ``streams``, ``fn`` and ``terms``, each rounded once.
    """
    return _map_and_read_backward(
        dx, dpost, dmix, dheld, streams, fn, terms, z, norm, *constants, of_weight
    )


@torch.library.custom_op("hyper_connections::merge", mutates_args=())
def merge(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """``new_j = post_j * out + sum_i mix_ij * streams_i``.

    Both weights are rounded to the streams' dtype first. The kernel sums in float32, rounds once.

    Args:
        streams: (T, n, D).
        out: (T, D), of the same dtype.
        post: (T, n) in ``accumulation_dtype``.
        mix: (T, n incoming, n outgoing) of the same.

    Returns:
        (T, n, D).
    """
    if not _on_kernels(streams):
        return merge_reference(streams, out, post, mix)
    from kernels.hyper_connections import triton_streams

    return triton_streams.merge(*(t.contiguous() for t in (streams, out, post, mix)))


@merge.register_fake
def _(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    return streams.new_empty(streams.shape)


@torch.library.custom_op("hyper_connections::merge_backward", mutates_args=())
def merge_backward(
    grad: torch.Tensor,
    streams: torch.Tensor,
    out: torch.Tensor,
    post: torch.Tensor,
    mix: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``merge``'s four inputs, given that of its result and the inputs."""
    if not _on_kernels(streams):
        return naive.merge_backward(grad, streams, out, post, mix)
    from kernels.hyper_connections import triton_streams

    return triton_streams.merge_backward(*(t.contiguous() for t in (grad, streams, out, post, mix)))


@merge_backward.register_fake
def _(
    grad: torch.Tensor,
    streams: torch.Tensor,
    out: torch.Tensor,
    post: torch.Tensor,
    mix: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    of = tuple(t.new_empty(t.shape) for t in (streams, out, post, mix))
    return of[0], of[1], of[2], of[3]
