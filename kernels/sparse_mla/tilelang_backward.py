"""Gradients of sparse latent attention on Hopper: one thread block per query and 64 heads."""

from functools import partial
from typing import Any

import torch

from kernels.sparse_mla.compiler import check_device, compiled
from kernels.sparse_mla.plan import row_plan, slot_tokens
from kernels.sparse_mla.shape import HEADS, TILE, Shape, check
from kernels.sparse_mla.tilelang_forward import padded_pools
from kernels.sparse_mla.tuned import choice, walk_of
from kernels.sparse_mla.walk import Walk, launch

STORE_BYTES = 2**30
"""Memory for gradients of keys before they are added up in the deterministic mode."""

DQ_BYTES = 2**30
"""Memory for float32 gradients of queries where keys are taken in ranges."""


def backward(
    q: torch.Tensor,
    latent: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    dlatent: torch.Tensor,
    *,
    size: int,
    scale: float,
    tail: int = 0,
    probabilities: bool = False,
    deterministic: bool = False,
    variant: str | None = None,
    scatter: str | None = None,
    walk: Walk | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``kernels.sparse_mla.tilelang_forward.forward``; P is computed again.

    Args:
        q, latent, pools, position, start, size, scale, tail: as in the forward.
        out: bfloat16 (Q, H, d), the forward's.
        lse: float32 (Q, H), the forward's.
        grad: bfloat16 (Q, H, d), gradient of ``out``.
        dlatent: float32 (T, d + tail), contiguous. The gradient of ``latent`` is added to it.
        probabilities: also return each pool's probability.
        deterministic: add the gradients of keys in a fixed order: blocks write them to memory of
            their own (``STORE_BYTES`` at a time) and torch adds them up, sorted by token. Several
            times slower. Otherwise thread blocks add to ``dlatent`` as they come.
        variant: ``split`` or ``simple`` instead of the tuned choice.
        scatter: ``lines`` or ``quads`` (split only) or ``pairs``, 128, 64 or 32 neighbouring bytes
            at a time, instead of the tuned.
        walk: in what order (split only, and not in the deterministic mode), instead of the tuned.
            In phase, ``dq`` is rounded differently from run to run; in ranges, up to ``DQ_BYTES``
            are needed.

    Returns:
        dq, bfloat16 (Q, H, d + tail); float32 (Q, n) probabilities summed over heads and over a
        pool's tokens, 0 where there is no pool, or None.

    Raises:
        ValueError: arguments that the kernels do not take.
        RuntimeError: no Hopper GPU, or a kernel does not compile.
    """
    shape = check(q, latent, pools, position, start, size=size, scale=scale, tail=tail)
    _check_gradients(q, latent, out, lse, grad, dlatent, shape)
    name, options = _choice(shape, variant, "store" if deterministic else scatter)
    walk = _walk_of(walk, len(latent), plain=name == "simple" or deterministic)
    check_device(q)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    mass = _mass(q, pools, shape, probabilities)
    if q.shape[0] == 0:
        return dq, mass[0] if probabilities else None
    with torch.cuda.device(q.device):
        plan = row_plan(pools, position, start, size)
        padded, latent = padded_pools(pools), latent.contiguous()
        delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
        rows = [x.contiguous() for x in (q, out, lse, grad)]
        compiled("row_dot", shape, threads=256)(rows[1], rows[3], delta)
        if name == "split":
            options |= _order(walk, q.device)
        kernel: Any = compiled(f"backward_{name}", shape, emit=probabilities, **options)
        if name == "split":
            kernel = partial(launch, kernel, walk.range_tokens, shape.size)
        step = _queries_at_once(shape, padded.shape[1], walk, deterministic) or len(q)
        for begin in range(0, len(q), step):
            some = slice(begin, begin + step)
            part: Any = mass[:, some] if probabilities else mass
            inputs = (
                rows[0][some], rows[3][some], latent, padded[some], plan[some], rows[2][some],
                delta[some], dq[some],
            )  # fmt: skip
            if not deterministic:
                kernel(*inputs, dlatent, part)
                continue
            part = part.contiguous()
            _add_in_order(kernel, inputs, part, dlatent, shape)
            if probabilities:
                mass[:, some] = part
    return dq, mass.sum(0)[:, : pools.shape[1]] if probabilities else None


def _choice(shape: Shape, variant: str | None, scatter: str | None) -> tuple[str, dict[str, Any]]:
    """The tuned variant and its options, but for what is given."""
    name, options = choice("backward", shape, variant)
    options["scatter"] = scatter or options["scatter"]
    legal = ("pairs", "quads", "lines", "store") if name == "split" else ("pairs", "store")
    if options["scatter"] not in legal:
        raise ValueError(f"sparse_mla: scatter={scatter!r} of the {name} variant, not in {legal}")
    return name, options


def _walk_of(walk: Walk | None, tokens: int, plain: bool) -> Walk:
    if plain and walk not in (None, Walk()):
        raise ValueError(
            f"sparse_mla: walk={walk!r}, legal is none in the simple variant and in the "
            "deterministic mode"
        )
    return Walk() if plain else walk or walk_of(tokens)


def _order(walk: Walk, device: torch.device) -> dict[str, Any]:
    """Options of the split kernel; one of its blocks fills a multiprocessor."""
    running = torch.cuda.get_device_properties(device).multi_processor_count
    return {"running": running if walk.in_phase else 0, "partial": walk.range_tokens > 0}


def _mass(q: torch.Tensor, pools: torch.Tensor, shape: Shape, probabilities: bool) -> torch.Tensor:
    """Zeros (blocks of heads, Q, max(n, 1)), or one element where nothing is asked for."""
    sizes = (shape.heads // HEADS, len(q), max(pools.shape[1], 1)) if probabilities else (1, 1, 1)
    return q.new_zeros(sizes, dtype=torch.float32)


def _slots(shape: Shape, pools: int) -> int:
    """Slots that the kernel walks through for a query that uses all of them."""
    return -(-(pools * shape.size + shape.size - 1) // TILE) * TILE


def _queries_at_once(shape: Shape, pools: int, walk: Walk, deterministic: bool) -> int | None:
    """How many fit the memory that is set aside for them; None: nothing is set aside."""
    if deterministic:
        blocks = shape.heads // HEADS
        row_bytes = 4 * blocks * _slots(shape, pools) * (shape.width + shape.tail)
        return max(1, STORE_BYTES // row_bytes)
    return max(1, DQ_BYTES // (4 * shape.heads * shape.width)) if walk.range_tokens else None


def _add_in_order(
    kernel: Any,
    inputs: tuple[torch.Tensor, ...],
    mass: torch.Tensor,
    dlatent: torch.Tensor,
    shape: Shape,
) -> None:
    """One launch that stores; then the sums, in the order of tokens, head blocks and queries."""
    pools, plan = inputs[3], inputs[4]
    blocks, slots = shape.heads // HEADS, _slots(shape, pools.shape[1])
    stored = dlatent.new_empty(blocks * len(plan) * slots, dlatent.shape[1])
    kernel(*inputs, stored, mass)
    tokens = slot_tokens(plan, pools, shape.size, slots).flatten().repeat(blocks)
    used = (tokens >= 0).nonzero().squeeze(1)
    # index_put_ sorts by index and keeps the order of equal ones; index_add_ adds as it comes.
    dlatent.index_put_((tokens[used],), stored[used], accumulate=True)


def _check_gradients(
    q: torch.Tensor,
    latent: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    dlatent: torch.Tensor,
    shape: Shape,
) -> None:
    rows = (q.shape[0], shape.heads, shape.width)
    for name, tensor, sizes, dtype in (
        ("out", out, rows, torch.bfloat16),
        ("grad", grad, rows, torch.bfloat16),
        ("lse", lse, rows[:2], torch.float32),
        ("dlatent", dlatent, tuple(latent.shape), torch.float32),
    ):
        if tuple(tensor.shape) != sizes or tensor.dtype != dtype:
            raise ValueError(
                f"sparse_mla: {name} is {tensor.dtype} {tuple(tensor.shape)}, legal is {dtype} "
                f"{sizes}"
            )
    if not dlatent.is_contiguous():
        raise ValueError(f"sparse_mla: dlatent has strides {dlatent.stride()}, legal is contiguous")
