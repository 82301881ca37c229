"""Sparse latent attention whose backward pass trains the indexer besides.

The indexer's target is every pool's share of the attention. The kernel that computes the
attention's gradients has the probabilities on chip, so it writes their sums down, and divergence
and gradients follow from those alone: the attention is not computed once more for the loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernels.dsa import sparse_mla
from kernels.dsa.indexer_loss import indexer_kl_of_mass
from kernels.dsa.pooling import Pools


@dataclass(frozen=True)
class Student:
    """The indexer that is trained.

    Attributes:
        queries: (T, index heads, d), differentiable.
        weights: (T, index heads) float32, differentiable.
        keys: (P, d), one per pool, differentiable.
        pools: their numbering.
        scale: factor on every product of query and key.
        factor: on the divergence in what is descended.
        seen: called with the divergence, a scalar, in backward: once, however often forward is
            recomputed.
    """

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    pools: Pools
    scale: float
    factor: float
    seen: Callable[[torch.Tensor], None]


class _Rest(NamedTuple):
    size: int
    scale: float
    backend: str
    chunk_bytes: int
    pools: Pools
    index_scale: float
    factor: float
    seen: Callable[[torch.Tensor], None]


def sparse_mla_kl(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    student: Student,
    *,
    size: int,
    scale: float,
    backend: str,
    chunk_bytes: int = sparse_mla.CHUNK_BYTES,
) -> torch.Tensor:
    """``kernels.dsa.sparse_mla.sparse_mla``; a backward pass through it also trains ``student``.

    Its gradient is that of ``factor`` times ``kernels.dsa.indexer_loss.indexer_kl`` over the
    selected pools, whatever gradient arrives at the output. Kept for backward: the inputs. Working
    memory in backward: that of the attention and 4 T n bytes for n pools per query; then, with the
    former gone, that of ``indexer_kl_of_mass``.

    Args:
        q, latent, kv_b, pools, position, start, size, scale, backend, chunk_bytes: as there.
        student: what is trained.

    Raises:
        RuntimeError: the kernel failed to import, compile or launch.
    """
    rest = _Rest(
        size, scale, backend, chunk_bytes, student.pools, student.scale, student.factor,
        student.seen,
    )  # fmt: skip
    of_student = student.queries, student.weights, student.keys
    return _SparseMlaKl.apply(q, latent, kv_b, pools, position, start, *of_student, rest)


class _SparseMlaKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        *tensors, rest = arguments
        ctx.save_for_backward(*tensors)
        ctx.rest = rest
        return sparse_mla.sparse_mla(
            *tensors[:6], size=rest.size, scale=rest.scale, backend=rest.backend,
            chunk_bytes=rest.chunk_bytes,
        )  # fmt: skip

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Once: a recomputed layer gives them out once.
        *attention, queries, weights, keys = ctx.saved_tensors
        rest: _Rest = ctx.rest
        nothing = queries.new_empty(0)
        *grads, mass = sparse_mla.sparse_mla_backward(
            grad_out.contiguous(), *attention, nothing, nothing, *rest[:4], True
        )
        chosen = attention[3]
        divergence, of_student = indexer_kl_of_mass(
            queries, weights, keys, rest.pools, chosen, mass, rest.index_scale, rest.factor
        )
        rest.seen(divergence)
        return *grads, None, None, None, *of_student, None
