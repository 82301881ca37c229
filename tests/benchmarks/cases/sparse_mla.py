"""Sparse latent attention, forward: 64 heads over 512 pools of four tokens and the unfinished one.

Shapes: q, out [T, H, D], latent [T, D], pools [T, P]; one document, pools spread at random, so a
query shares few keys with its neighbours. The gate has several documents and at most 2,560 tokens.
What peers are given instead of pools: ``tests.benchmarks.sparse_mla_peers``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.sparse_mla import naive
from kernels.sparse_mla.inputs import Inputs, draw_inputs
from tests.benchmarks import sparse_mla_peers as peers
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device

SETTINGS: dict[str, Any] = {"size": peers.SIZE, "scale": peers.SCALE}
GATE_TOKENS = 2560

SIZES = {
    "small": Size(shape={"T": 192, "H": 2, "D": 16, "P": 16}, dtype="float32"),
    "32k": Size(
        shape={"T": 32768, "H": 64, "D": 512, "P": 512}, dtype="bfloat16", devices=("cuda",)
    ),
    "128k": Size(
        shape={"T": 131072, "H": 64, "D": 512, "P": 512}, dtype="bfloat16", devices=("cuda",)
    ),
}


def make_inputs(size: Size, device: Device, seed: int, stage: Stage) -> Inputs:
    """Random inputs; several documents, short ones too, at the gate."""
    t, h, d, count = (size.shape[key] for key in "THDP")
    if stage == "gate":
        t = min(t, GATE_TOKENS)
    lengths = (t,) if stage == "timing" else (1, 2, 3, 4, 5, t // 8, t - t // 8 - 15)
    return draw_inputs(
        lengths,
        heads=h,
        width=d,
        count=count,
        seed=seed,
        dtype=getattr(torch, size.dtype),
        device=device,
    )


def used_keys(t: int, count: int) -> int:
    """Keys of all queries of one document together."""
    size = SETTINGS["size"]
    seen = torch.arange(1, t + 1)
    return int((seen // size).clamp(max=count).mul(size).add(seen % size).sum())


def reference(inputs: Inputs) -> Outputs:
    """Float64 for short inputs, else float32."""
    short = inputs.q.numel() < 2**20
    wide = inputs.cast(torch.float64 if short else torch.float32)
    out, lse = naive.forward_reference(*wide[:5], **SETTINGS)
    return {"out": out, "lse": lse}


def tolerance(size: Size) -> dict[str, float]:
    """bfloat16 rounds probabilities and the output."""
    limit = 1e-5 if size.dtype == "float32" else 1e-2
    return {"out": limit, "lse": 1e-5 if size.dtype == "float32" else 1e-3}


def floor(size: Size, machine: Machine) -> Floor:
    """Two products with every used key; queries, outputs and latent moved once, ids too."""
    t, h, d, count = (size.shape[key] for key in "THDP")
    keys, width = used_keys(t, count), getattr(torch, size.dtype).itemsize
    return roofline(
        machine,
        dtype=size.dtype,
        flops=4.0 * keys * h * d,
        flops_text=f"2 products x 2 x {keys} keys x {h} heads x {d}",
        nbytes=float(width * t * d * (2 * h + 1) + 4 * t * count),
        bytes_text=f"q, out: 2 x {width} B x {t} x {h} x {d}; latent; ids 4 B x {t} x {count}",
    )


def _ours(inputs: Inputs, device: Device, *, variant: str) -> Runnable:
    from kernels.sparse_mla.tilelang_forward import forward

    def call() -> Outputs:
        out, lse = forward(*inputs[:5], variant=variant, **SETTINGS)
        return {"out": out, "lse": lse}

    return Runnable(call=call)


def too_long(size: Size) -> str:
    """Why plain torch is not run at this size."""
    queries = size.shape["T"]
    return f"left out, minutes per call at {queries} queries" if queries > 40_000 else ""


def _plain(inputs: Inputs, device: Device) -> Runnable:
    def call() -> Outputs:
        out, lse = naive.forward_reference(*inputs[:5], upcast=False, **SETTINGS)
        return {"out": out, "lse": lse}

    return Runnable(call=call)


def kernel_variants(
    ours: Callable[..., Runnable], forms: tuple[tuple[str, dict[str, Any]], ...]
) -> tuple[Variant, ...]:
    """Our TileLang kernels: name, and what ``ours`` takes besides inputs and device."""
    return tuple(
        Variant(
            name=name,
            role="ours",
            build=partial(ours, **settings),
            requires=("tilelang",),
            devices=("cuda",),
            dtypes=("bfloat16",),
        )
        for name, settings in forms
    )


def peer(name: str, build: Callable[..., Runnable], *packages: str, **declared: Any) -> Variant:
    """A kernel of others, if its packages are there."""
    return Variant(
        name=name, role="peer", build=build, requires=packages, devices=("cuda",), **declared
    )


CASE = Case(
    name="sparse_mla",
    question="How far from its floor is the forward of sparse latent attention?",
    sizes=SIZES,
    inputs=make_inputs,
    reference=reference,
    tolerance=tolerance,
    floor=floor,
    variants=(
        *kernel_variants(
            _ours, (("split", {"variant": "split"}), ("simple", {"variant": "simple"}))
        ),
        Variant(name="plain torch", role="ours", build=_plain, unfit=too_long),
        peer("flash_mla", peers.flash_mla, "flash_mla"),
        peer("tilelang_example", peers.example_forward, "tilelang", files=peers.EXAMPLE_FILES),
    ),
)
