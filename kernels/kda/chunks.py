"""The matrices of KDA's chunk form, forward and backward, in plain torch.

Derivation: Kimi Linear, arXiv 2510.26692, section 3.2. Within a chunk, with G the sums of the log
decays from its first token on, S (dk, dv) the state that enters it, and i, j its tokens:

    query_i = q_i exp(G_i)    key_i = k_i exp(G_i)    stored_j = k_j exp(-G_j)
    A = beta key stored^T, j < i          P = query stored^T, j <= i
    [W | U] = (I + A)^-1 beta [key | v]   V = U - W S
    O = query S + P V                     S' = exp(G_last) S + closing^T V
    closing_j = k_j exp(G_last - G_j)

S' is affine in S, so its matrix and its offset come from batched products, and the recurrence over
the chunks is one small product each.

Range: over 16 tokens the decays span e^80 at the bound of -5. So query and key carry a factor 2^s,
stored and the state that meets them 2^-s, with s such that both stay within e^-40 and e^40. Nothing
overflows, and a small gradient through a saturated gate does not vanish in float32.
"""

import math
from typing import NamedTuple

import torch

from kernels.kda.inputs import NORM_EPS

CHUNK = 16
"""Tokens of a chunk."""


class Inputs(NamedTuple):
    """n chunks of H heads, all of one dtype (float32 or float64).

    q, k, raw_gate: (n, H, CHUNK, dk); v: (n, H, CHUNK, dv); beta: (n, H, CHUNK, 1);
    steepness: (H, 1, 1), exp(A_log); bias: (H, 1, dk); used: (n, 1, CHUNK, 1), zero in padding,
    where nothing may decay, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    raw_gate: torch.Tensor
    beta: torch.Tensor
    steepness: torch.Tensor
    bias: torch.Tensor
    lower_bound: float
    used: torch.Tensor | None = None


class Chunks(NamedTuple):
    """What the inputs alone decide; shapes as the inputs', names as in the module's docstring."""

    q: torch.Tensor
    """Unit length times dk ** -0.5; ``q_scale`` (n, H, CHUNK, 1) made it of the input."""
    q_scale: torch.Tensor
    k: torch.Tensor
    """Unit length, by ``k_scale``."""
    k_scale: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    shifted: torch.Tensor
    """Raw gate plus bias."""
    gate: torch.Tensor
    """Log decay of every token."""
    factor: float
    """2^s."""
    lifted: torch.Tensor
    """exp(G) 2^s."""
    query: torch.Tensor
    key: torch.Tensor
    stored: torch.Tensor
    closing: torch.Tensor
    P: torch.Tensor
    """(n, H, CHUNK, CHUNK), as is ``inverse``, (I + A)^-1."""
    inverse: torch.Tensor
    W: torch.Tensor
    """With the factor 2^s of ``key``."""
    U: torch.Tensor


class Step(NamedTuple):
    """A chunk's effect on the state: S' = matrix S + offset; (n, H, dk, dk) and (n, H, dk, dv)."""

    matrix: torch.Tensor
    offset: torch.Tensor


def prepare(x: Inputs) -> Chunks:
    """All that can be computed for every chunk at once."""
    width = x.q.shape[-1]
    factor = 2.0 ** round(-x.lower_bound * CHUNK / 2 / math.log(2))
    q_scale, k_scale = _unit_scale(x.q).mul_(width**-0.5), _unit_scale(x.k)
    q, k = x.q * q_scale, x.k * k_scale
    shifted = x.raw_gate + x.bias
    gate = (x.steepness * shifted).sigmoid_().mul_(x.lower_bound)
    if x.used is not None:
        gate.mul_(x.used)
    lifted = gate.cumsum(-2).exp_().mul_(factor)
    query, key, stored = q * lifted, k * lifted, k / lifted
    probe = x.beta * key
    identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
    # The solver reads nothing on or above the diagonal of A.
    inverse = torch.linalg.solve_triangular(
        probe @ stored.mT, identity, upper=False, unitriangular=True
    )
    return Chunks(
        q=q, q_scale=q_scale, k=k, k_scale=k_scale, v=x.v, beta=x.beta, shifted=shifted, gate=gate,
        factor=factor, lifted=lifted, query=query, key=key, stored=stored,
        closing=stored * lifted[..., -1:, :], P=(query @ stored.mT).tril_(), inverse=inverse,
        W=inverse @ probe, U=inverse @ (x.beta * x.v),
    )  # fmt: skip


def forward(
    c: Chunks, state: torch.Tensor, fresh: tuple[bool, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the chunks and the state that the last one leaves.

    Args:
        state: (H, dk, dv), what the chunk before the first of these left.
        fresh: per chunk, whether it starts from a state of zeros instead.

    Returns:
        (n, H, CHUNK, dv) and (H, dk, dv).
    """
    entering, state = _scan(_step(c), state, fresh)
    entering.div_(c.factor)
    return c.query @ entering + c.P @ (c.U - c.W @ entering), state


def backward(
    x: Inputs,
    state: torch.Tensor,
    fresh: tuple[bool, ...],
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Gradients, given those of ``forward``'s two results.

    Returns:
        Of q, k, v, raw_gate and beta, shaped as in ``Inputs``; of A_log (H,) and dt_bias (H * dk,);
        of ``state``.
    """
    c = prepare(x)
    step = _step(c)
    entering, _ = _scan(step, state, fresh)
    scaled = entering / c.factor
    V = c.U - c.W @ scaled
    to_V = c.P.mT @ grad_out
    to_entering = (c.query.mT @ grad_out - c.W.mT @ to_V).div_(c.factor)
    leaving, grad_state = _scan_backward(step, to_entering, grad_state, fresh)

    # From the outputs and the states, back to the rows of every chunk.
    to_V += c.closing @ leaving
    to_closing = V @ leaving.mT
    to_probe = c.inverse.mT @ (to_V @ scaled.mT).neg_()
    to_weighed = c.inverse.mT @ to_V
    to_A = (to_probe @ c.W.mT + to_weighed @ c.U.mT).tril_(-1).neg_()
    to_P = (grad_out @ V.mT).tril_()
    to_query = grad_out @ scaled.mT + to_P @ c.stored
    to_probe += to_A @ c.stored
    to_stored = to_P.mT @ c.query + to_A.mT @ (c.beta * c.key) + to_closing * c.lifted[..., -1:, :]

    # From the rows to the inputs; every product with a decay also counts towards G.
    to_q = to_query.mul_(c.lifted)
    over_query, over_key, over_stored = to_q * c.q, to_probe * c.key, to_stored * c.stored
    to_beta = (over_key.sum(-1) + (to_weighed * c.v).sum(-1)).unsqueeze(-1)
    over_key *= c.beta
    to_k = to_stored.div_(c.lifted) + to_probe.mul_(c.beta).mul_(c.lifted)
    to_G = over_query + over_key - over_stored
    to_G[..., -1, :] += to_closing.mul_(c.closing).sum(-2)
    to_G[..., -1, :] += (entering * leaving).sum(-1) * (c.lifted[..., -1, :] / c.factor)
    to_gate = to_G.flip(-2).cumsum(-2).flip(-2)
    to_raw = to_gate.mul_(c.gate).mul_(1 - c.gate / x.lower_bound).mul_(x.steepness)
    rows = [
        _unit_backward(to_q, c.q, c.q_scale, over_query, c.q.shape[-1]),
        _unit_backward(to_k, c.k, c.k_scale, over_key.add_(over_stored), 1.0),
        to_weighed.mul_(c.beta),
        to_raw,
        to_beta,
    ]
    shared = [(to_raw * c.shifted).sum((0, 2, 3)), to_raw.sum((0, 2)).flatten()]
    return rows, shared, grad_state


def _unit_scale(x: torch.Tensor) -> torch.Tensor:
    """What makes the last axis of ``x`` of unit length."""
    return x.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()


def _unit_backward(
    grad: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, over: torch.Tensor, weight: float
) -> torch.Tensor:
    """Gradient of x, of y = scale x with |y|^2 = 1 / weight; ``over`` is grad * y."""
    along = over.sum(-1, keepdim=True).mul_(scale)
    return grad.mul_(scale).addcmul_(y, along, value=-weight)


def _step(c: Chunks) -> Step:
    matrix = (c.closing.mT @ c.W).div_(-c.factor)
    matrix.diagonal(dim1=-2, dim2=-1).add_(c.lifted[..., -1, :] / c.factor)
    return Step(matrix, c.closing.mT @ c.U)


def _scan(
    step: Step, state: torch.Tensor, fresh: tuple[bool, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states that enter the chunks (n, H, dk, dv), and what the last chunk leaves."""
    entering, none = [], torch.zeros_like(state)
    for new, matrix, offset in zip(fresh, *(t.unbind() for t in step), strict=True):
        entering.append(none if new else state)
        state = torch.baddbmm(offset, matrix, entering[-1])
    return torch.stack(entering), state


def _scan_backward(
    step: Step, to_entering: torch.Tensor, grad_state: torch.Tensor, fresh: tuple[bool, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the states that leave the chunks, and of the one that enters the first.

    ``to_entering`` is each entering state's gradient through its own chunk's outputs.
    """
    leaving, none = [], torch.zeros_like(grad_state)
    steps = list(zip(fresh, step.matrix.mT.unbind(), to_entering.unbind(), strict=True))
    for new, matrix, own in reversed(steps):
        leaving.append(grad_state)
        grad_state = none if new else torch.baddbmm(own, matrix, grad_state)
    return torch.stack(leaving[::-1]), grad_state
