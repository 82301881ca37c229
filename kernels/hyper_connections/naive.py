"""The definition of a fused site in plain torch, and its gradients by autograd: any device."""

from typing import NamedTuple

import torch

from kernels.hyper_connections.mapping import project_reference
from kernels.hyper_connections.merge import merge_reference
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
    constants: Constants,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``op.map_and_read_backward``."""
    leaves = [t.detach().requires_grad_() for t in (streams, fn, terms)]
    with torch.enable_grad():
        made = map_and_read(leaves[0], leaves[1], leaves[2], constants)
    of_streams, of_fn, of_terms = torch.autograd.grad(made[:3], leaves, (dx, dpost, dmix))
    return of_streams if dheld is None else of_streams + dheld, of_fn, of_terms


def merge_backward(grad: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """See ``op.merge_backward``."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        merged = merge_reference(*leaves)
    return torch.autograd.grad(merged, leaves, grad)
