"""Sparse latent attention, backward: the inputs of ``sparse_mla`` and the output's gradient.

The gradient of the latent is added up in float32. ``split`` is what training runs at this length,
``split_in_order`` and ``split_in_phase`` are orders in which it can take the keys
(``kernels.sparse_mla.walk``). ``split_quads`` adds 64 bytes of a row at a time instead of a line of
128, ``split_with_pools`` also returns the pools' probabilities. Selection hands out ascending
pools; nothing is sorted in the time.
"""

from typing import Any

import torch

from kernels.sparse_mla import naive
from kernels.sparse_mla.inputs import Inputs
from kernels.sparse_mla.walk import Walk
from tests.benchmarks import sparse_mla_peers as peers
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Variant
from tests.benchmarks.cases.sparse_mla import (
    SETTINGS,
    SIZES,
    kernel_variants,
    make_inputs,
    peer,
    too_long,
    used_keys,
)
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device


def reference(inputs: Inputs) -> Outputs:
    """Float64 for short inputs, else float32."""
    short = inputs.q.numel() < 2**20
    wide = inputs.cast(torch.float64 if short else torch.float32)
    dq, dlatent, _ = naive.backward_reference(*wide, **SETTINGS)
    return {"dq": dq, "dlatent": dlatent}


def tolerance(size: Size) -> dict[str, float]:
    """bfloat16 rounds probabilities, their gradients and dq."""
    limit = 1e-5 if size.dtype == "float32" else 2e-2
    return {"dq": limit, "dlatent": limit}


def floor(size: Size, machine: Machine) -> Floor:
    """Five products with every used key; what goes in and out moved once, dlatent in float32."""
    t, h, d, count = (size.shape[key] for key in "THDP")
    keys, width = used_keys(t, count), getattr(torch, size.dtype).itemsize
    return roofline(
        machine,
        dtype=size.dtype,
        flops=10.0 * keys * h * d,
        flops_text=f"5 products x 2 x {keys} keys x {h} heads x {d}",
        nbytes=float(width * t * d * (4 * h + 1) + 4 * t * d + 4 * t * count),
        bytes_text=f"q, out, dout, dq: 4 x {width} B x {t} x {h} x {d}; latent, dlatent, ids",
    )


def _ours(inputs: Inputs, device: Device, **settings: Any) -> Runnable:
    from kernels.sparse_mla.tilelang_backward import backward
    from kernels.sparse_mla.tilelang_forward import forward

    out, lse = forward(*inputs[:5], **SETTINGS)

    def call() -> Outputs:
        dlatent = torch.zeros_like(inputs.latent, dtype=torch.float32)
        dq, _ = backward(*inputs[:5], out, lse, inputs.grad, dlatent, **settings, **SETTINGS)
        return {"dq": dq, "dlatent": dlatent}

    return Runnable(call=call)


def _plain(inputs: Inputs, device: Device) -> Runnable:
    def call() -> Outputs:
        dq, dlatent, _ = naive.backward_reference(*inputs, upcast=False, **SETTINGS)
        return {"dq": dq, "dlatent": dlatent}

    return Runnable(call=call)


FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("split", {"variant": "split"}),
    ("split_in_order", {"variant": "split", "walk": Walk()}),
    ("split_in_phase", {"variant": "split", "walk": Walk(in_phase=True)}),
    ("split_with_pools", {"variant": "split", "probabilities": True}),
    ("split_quads", {"variant": "split", "scatter": "quads"}),
    ("simple", {"variant": "simple"}),
    ("deterministic", {"variant": "split", "deterministic": True}),
)

CASE = Case(
    name="sparse_mla_backward",
    question="How far from its floor is the backward of sparse latent attention?",
    sizes=SIZES,
    inputs=make_inputs,
    reference=reference,
    tolerance=tolerance,
    floor=floor,
    variants=(
        *kernel_variants(_ours, FORMS),
        Variant(name="plain torch", role="ours", build=_plain, unfit=too_long),
        peer("cudnn", peers.cudnn_backward, "cudnn", "tilelang"),
        peer(
            "tilelang_example",
            peers.example_backward,
            "tilelang",
            files=peers.EXAMPLE_BACKWARD_FILES,
        ),
    ),
)
