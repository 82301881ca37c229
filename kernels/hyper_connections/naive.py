"""The definition of a fused site in plain torch, and its gradients: any device."""

from typing import NamedTuple

import torch

from kernels.hyper_connections.mapping import project_reference
from kernels.hyper_connections.read import read_reference
from kernels.hyper_connections.sinkhorn import sinkhorn_reference
from kernels.precision import accumulation_dtype


class Constants(NamedTuple):
    """Numbers of a model's sites.

    Attributes:
        norm_eps: added to the mean square of all streams together.
        eps: added to the reading weights, and in the Sinkhorn iteration.
        iterations: of it, >= 1.
    """

    norm_eps: float
    eps: float
    iterations: int


class Read(NamedTuple):
    """What reading the streams makes, with one leading dimension of tokens.

    Attributes:
        x: (T, D) in the dtype of the streams.
        post: (T, n) in ``accumulation_dtype``, like the rest.
        mix: (T, n incoming, n outgoing).
        z: (T, n^2 + 2n), the projected streams before scale and shift.
        norm: (T,), one over the root of the streams' mean square.
    """

    x: torch.Tensor
    post: torch.Tensor
    mix: torch.Tensor
    z: torch.Tensor
    norm: torch.Tensor


def maps(
    z: torch.Tensor, terms: torch.Tensor, n: int, constants: Constants
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``pre``, ``post`` and ``mix`` of projected streams; differentiable."""
    logits = z * terms[0] + terms[1]
    pre = logits[:, :n].sigmoid() + constants.eps
    post = 2 * logits[:, n : 2 * n].sigmoid()
    squares = logits[:, 2 * n :].unflatten(-1, (n, n))
    return pre, post, sinkhorn_reference(squares, constants.iterations, constants.eps)


def map_and_read(
    streams: torch.Tensor, fn: torch.Tensor, terms: torch.Tensor, constants: Constants
) -> Read:
    """See ``op.map_and_read``; differentiable but for ``norm``."""
    n = streams.shape[1]
    flat = streams.flatten(1)
    z = project_reference(flat, fn, constants.norm_eps)
    pre, post, mix = maps(z, terms, n, constants)
    wide = flat.detach().to(accumulation_dtype(streams.dtype))
    norm = torch.rsqrt(wide.square().mean(-1) + constants.norm_eps)
    return Read(read_reference(streams, pre), post, mix, z, norm)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``op.map_and_read_backward``."""
    wide, wide_dx = streams.to(z.dtype), dx.to(z.dtype).unsqueeze(1)
    dpre = (wide * wide_dx).sum(-1)
    pre, dlogits = _maps_backward(dpre, dpost, dmix, z, terms, constants)
    dterms = torch.stack(((dlogits * z).sum(0), dlogits.sum(0)))
    dz = dlogits * terms[0]
    # d norm / d x = -norm^3 x / width, and z already holds one factor of norm.
    pull = (z * dz).sum(-1) * norm.square() / fn.shape[1]
    dz = dz * norm.unsqueeze(-1)
    back = (dz @ fn.to(z.dtype)).view_as(wide) - pull[:, None, None] * wide
    back += pre.unsqueeze(-1) * wide_dx
    if dheld is not None:
        back += dheld
    dfn = dz.t() @ wide.flatten(1)
    return back.to(streams.dtype), dfn.to(fn.dtype), dterms.to(terms.dtype)


def _maps_backward(
    dpre: torch.Tensor,
    dpost: torch.Tensor,
    dmix: torch.Tensor,
    z: torch.Tensor,
    terms: torch.Tensor,
    constants: Constants,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``pre`` once more, and the gradient of the logits."""
    n, eps = dpre.shape[1], constants.eps
    logits = z * terms[0] + terms[1]
    sigmoid = logits[:, : 2 * n].sigmoid()
    of_sigmoid = torch.cat((dpre, 2 * dpost), 1) * sigmoid * (1 - sigmoid)
    share = logits[:, 2 * n :].unflatten(-1, (n, n)).softmax(-1)
    matrix, sums = share + eps, []
    for turn in range(2 * constants.iterations - 1):
        sums.append(matrix.sum(-1 if turn % 2 else -2, keepdim=True) + eps)
        matrix = matrix / sums[-1]
    for turn in reversed(range(len(sums))):
        along = (dmix * matrix).sum(-1 if turn % 2 else -2, keepdim=True)
        dmix = (dmix - along) / sums[turn]
        matrix = matrix * sums[turn]
    of_share = share * (dmix - (dmix * share).sum(-1, keepdim=True))
    return sigmoid[:, :n] + eps, torch.cat((of_sigmoid, of_share.flatten(1)), 1)


def merge_backward(
    grad: torch.Tensor,
    streams: torch.Tensor,
    out: torch.Tensor,
    post: torch.Tensor,
    mix: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``op.merge_backward``."""
    wide = grad.to(accumulation_dtype(grad.dtype))
    rounded_post, rounded_mix = (t.to(streams.dtype).to(wide.dtype) for t in (post, mix))
    dstreams = rounded_mix @ wide
    dout = (rounded_post.unsqueeze(-1) * wide).sum(1)
    dpost = (wide * out.unsqueeze(1)).sum(-1)
    dmix = streams.to(wide.dtype) @ wide.transpose(1, 2)
    return dstreams.to(streams.dtype), dout.to(out.dtype), dpost.to(post.dtype), dmix.to(mix.dtype)
