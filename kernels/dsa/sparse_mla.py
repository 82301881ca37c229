"""Sparse latent attention around a kernel for the absorbed form: a torch operation with gradients.

A few queries at a time are mapped into the latent ("absorbed"), attend there, and their outputs are
mapped back (DeepSeek-V2, arXiv 2405.04434, section 2.1). The maps are grouped matrix products in
the tensors' own dtype; a kernel (``kernels.backends.ops.SparseMlaKernels``) does the rest.

What is kept for backward, per token at 64 heads, r = 512, d = 256, bfloat16:

* q 32 KiB, latent 1 KiB and pools 2 KiB, the inputs. Nothing else by default.
* Absorbed queries, 64 KiB, are made again: 2 heads d r = 17 MFLOP, about 3 ms per 128K tokens.
* Latent outputs, 64 KiB, are made again by the forward kernel. The gradient of the values' map
  needs them (sum over queries of grad_out^T latent_out), and they cannot be had from the output,
  which is half as wide. Their inner products with their gradients, which softmax's backward asks
  for, are equal in both spaces, but come for free once the latent outputs are there.
* LSE, 256 B, comes out of the same run of the forward kernel, so keeping it would spare nothing.

``keep`` keeps latent outputs and LSE: for callers whose graph is gone after a few thousand tokens,
where the forward kernel would otherwise run a third time.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.backends.ops import SPARSE_MLA, SparseMlaKernels
from kernels.precision import accumulation_dtype, add_bmm_

CHUNK_BYTES = 2**30
"""Default memory of the queries that are computed together: 4,096 of them in backward, 8,192 in
forward, at 64 heads, r = 512, bfloat16."""

_IN_FORWARD = 2  # absorbed queries, latent outputs
_IN_BACKWARD = 4  # and the gradients of both


def queries_at_once(q: torch.Tensor, rank: int, tensors: int, chunk_bytes: int) -> int:
    """How many queries fit ``chunk_bytes`` with that many tensors in the latent; at least one."""
    return max(1, chunk_bytes // (tensors * q.shape[1] * rank * q.element_size()))


def sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    *,
    size: int,
    scale: float,
    backend: str,
    chunk_bytes: int = CHUNK_BYTES,
    keep: bool = False,
) -> torch.Tensor:
    """See ``kernels.dsa.plain.sparse_mla``: the same function, rounded where the kernel rounds.

    ``latent`` may have a wider dtype than q; it is rounded once, and its gradient is not. Gradients
    of ``latent`` and ``kv_b`` are summed in float32. Working memory: ``chunk_bytes``, a copy of the
    latents in q's dtype, and in backward the gradients of latents and maps in float32.

    Args:
        backend: one of ``SPARSE_MLA.backends`` that follows ``SparseMlaKernels``.
        chunk_bytes: for the queries that are computed together.
        keep: keep latent outputs and LSE for backward.

    Raises:
        RuntimeError: the kernel failed to import, compile or launch.
    """
    keep = keep and torch.is_grad_enabled()
    arguments = q, latent, kv_b, pools, position, start
    return _forward(*arguments, size, scale, backend, chunk_bytes, keep)[0]


class _Maps:
    """Both halves of ``kv_b``, per head, in q's dtype: keys (heads, d_qk, r), values
    (heads, d_v, r)."""

    def __init__(self, kv_b: torch.Tensor, q: torch.Tensor) -> None:
        per_head = kv_b.to(q.dtype).view(q.shape[1], -1, kv_b.shape[1])
        self.key, self.value = per_head[:, : q.shape[2]], per_head[:, q.shape[2] :]


def _by_heads(rows: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """(Q, heads, a) and (heads, a, b) -> (Q, heads, b), contiguous as kernels want it."""
    out = rows.new_empty(*rows.shape[:2], maps.shape[2])
    torch.bmm(rows.transpose(0, 1), maps, out=out.transpose(0, 1))
    return out


def _rows(count: int, step: int) -> Iterator[slice]:
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


@torch.library.custom_op("kernels::sparse_mla", mutates_args=())
def _forward(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    size: int,
    scale: float,
    backend: str,
    chunk_bytes: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output; latent outputs and LSE, or empty tensors."""
    return run_forward(
        q, latent, kv_b, pools, position, start, size, scale, backend, chunk_bytes, keep
    )


def run_forward(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    size: int,
    scale: float,
    backend: str,
    chunk_bytes: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operation's forward, on any device that the kernel runs on."""
    kernels, maps, low = _kernels(backend), _Maps(kv_b, q), latent.to(q.dtype)
    attend = SPARSE_MLA.guard(backend, kernels.forward)
    out, mixed, lse = _outputs(q, latent, kv_b, keep)
    for rows in _rows(len(q), queries_at_once(q, latent.shape[1], _IN_FORWARD, chunk_bytes)):
        of_rows = pools[rows], position[rows], start[rows]
        absorbed = _by_heads(q[rows], maps.key)
        some, some_lse = attend(absorbed, low, *of_rows, size=size, scale=scale)
        torch.bmm(some.transpose(0, 1), maps.value.mT, out=out[rows].transpose(0, 1))
        if keep:
            mixed[rows], lse[rows] = some, some_lse
        # Or they would live on beside the next chunk's.
        del absorbed, some, some_lse
    return out, mixed, lse


def _outputs(
    q: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, heads, d_qk = q.shape
    kept = tokens if keep else 0
    return (
        q.new_empty(tokens, heads, kv_b.shape[0] // heads - d_qk),
        q.new_empty(kept, heads, latent.shape[1]),
        q.new_empty(kept, heads, dtype=accumulation_dtype(q.dtype)),
    )


@_forward.register_fake
def _(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    size: int,
    scale: float,
    backend: str,
    chunk_bytes: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _outputs(q, latent, kv_b, keep)


@torch.library.custom_op("kernels::sparse_mla_backward", mutates_args=())
def sparse_mla_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    mixed: torch.Tensor,
    lse: torch.Tensor,
    size: int,
    scale: float,
    backend: str,
    chunk_bytes: int,
    probabilities: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``run_backward`` with all gradients in the dtypes of what they are of."""
    grad_q, grad_latent, grad_kv_b, mass = run_backward(
        grad_out, q, latent, kv_b, pools, position, start, mixed, lse, size, scale, backend,
        chunk_bytes, probabilities,
    )  # fmt: skip
    return grad_q, grad_latent.to(latent.dtype), grad_kv_b, mass


def run_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    mixed: torch.Tensor,
    lse: torch.Tensor,
    size: int,
    scale: float,
    backend: str,
    chunk_bytes: int,
    probabilities: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operation's backward; ``mixed`` and ``lse`` are empty if forward kept nothing.

    The gradient of the latents is not rounded: for sums over ranks. Last comes, with
    ``probabilities``, each pool's probability summed over heads and the pool's tokens, (Q, n) in
    ``accumulation_dtype``, 0 where there is none; otherwise an empty tensor.
    """
    kernels, maps, low = _kernels(backend), _Maps(kv_b, q), latent.to(q.dtype)
    forward = SPARSE_MLA.guard(backend, kernels.forward)
    backward = SPARSE_MLA.guard(backend, kernels.backward)
    wide, heads, d_qk = accumulation_dtype(q.dtype), *q.shape[1:]
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_latent = torch.zeros_like(low, dtype=wide)
    grad_maps = q.new_zeros(heads, kv_b.shape[0] // heads, kv_b.shape[1], dtype=wide)
    options: dict[str, Any] = {"size": size, "scale": scale}
    mass = q.new_empty(pools.shape if probabilities else 0, dtype=wide)
    exact_order = torch.are_deterministic_algorithms_enabled()
    for rows in _rows(len(q), queries_at_once(q, latent.shape[1], _IN_BACKWARD, chunk_bytes)):
        of_rows = pools[rows], position[rows], start[rows]
        absorbed, grad = _by_heads(q[rows], maps.key), grad_out[rows]
        if len(mixed):
            some, some_lse = mixed[rows], lse[rows]
        else:
            some, some_lse = forward(absorbed, low, *of_rows, **options)
        add_bmm_(grad_maps[:, d_qk:], grad.permute(1, 2, 0), some.transpose(0, 1))
        grad_some = _by_heads(grad, maps.value)
        grad_absorbed, some_mass = backward(
            absorbed, low, *of_rows, some, some_lse, grad_some, grad_latent,
            **options, probabilities=probabilities, deterministic=exact_order,
        )  # fmt: skip
        if probabilities:
            mass[rows] = some_mass
        del absorbed, some, grad_some
        add_bmm_(grad_maps[:, :d_qk], q[rows].permute(1, 2, 0), grad_absorbed.transpose(0, 1))
        torch.bmm(grad_absorbed.transpose(0, 1), maps.key.mT, out=grad_q[rows].transpose(0, 1))
        del grad_absorbed
    # As new tensors, whatever the dtypes: an operation returns none that it was given.
    return grad_q, grad_latent, grad_maps.view(kv_b.shape).to(kv_b.dtype), mass


@sparse_mla_backward.register_fake
def _(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    mixed: torch.Tensor,
    lse: torch.Tensor,
    size: int,
    scale: float,
    backend: str,
    chunk_bytes: int,
    probabilities: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mass = q.new_empty(pools.shape if probabilities else 0, dtype=accumulation_dtype(q.dtype))
    return torch.empty_like(q), torch.empty_like(latent), torch.empty_like(kv_b), mass


def _kernels(backend: str) -> SparseMlaKernels:
    return SPARSE_MLA.load(backend)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, size, scale, backend, chunk_bytes, _ = inputs
    _, mixed, lse = output
    ctx.save_for_backward(*tensors, mixed, lse)
    ctx.rest = size, scale, backend, chunk_bytes
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_out: torch.Tensor | None, *of_kept: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 11
    saved = ctx.saved_tensors
    *grads, _ = sparse_mla_backward(grad_out.contiguous(), *saved, *ctx.rest, False)
    return *grads, *(None,) * 8


_forward.register_autograd(_differentiate, setup_context=_setup)
