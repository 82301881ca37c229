"""Sparse latent attention, forward: 64 heads over 512 pools of four tokens and the unfinished one.

Shapes: q, out [T, H, D], latent [T, D], pools [T, P]; one document, pools spread at random, so a
query shares few keys with its neighbours. The gate has several documents and at most 2,560 tokens.
FlashMLA and TileLang's public example (``examples/deepseek_v32`` on the Python path) take token
ids, 2,176 and 2,112 of them; the example also 64 more columns, here zeros.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.dsa.keys import selected_tokens
from kernels.sparse_mla import naive
from kernels.sparse_mla.inputs import Inputs, draw_inputs
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device

SETTINGS: dict[str, Any] = {"size": 4, "scale": 1 / 16}
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


def short_enough(inputs: Inputs) -> None:
    """Raises ValueError where plain torch would take too long for one to wait."""
    if len(inputs.q) > 40_000:
        raise ValueError(f"plain torch: a minute and more per call at {len(inputs.q)} queries")


def _plain(inputs: Inputs, device: Device) -> Runnable:
    short_enough(inputs)

    def call() -> Outputs:
        out, lse = naive.forward_reference(*inputs[:5], upcast=False, **SETTINGS)
        return {"out": out, "lse": lse}

    return Runnable(call=call)


def token_ids(inputs: Inputs, multiple: int, unused: int) -> torch.Tensor:
    """int32 (T, slots), padded with ``unused`` to a multiple; what kernels for token ids take."""
    ids = []
    for begin in range(0, len(inputs.pools), 8192):
        some = inputs.rows(slice(begin, begin + 8192))
        tokens, used = selected_tokens(some.pools, some.position, some.start, SETTINGS["size"])
        tokens = torch.where(used, tokens, unused).int()
        pad = -tokens.shape[1] % multiple
        ids.append(torch.nn.functional.pad(tokens, (0, pad), value=unused))
    return torch.cat(ids)


def _flash_mla(inputs: Inputs, device: Device) -> Runnable:
    from flash_mla import flash_mla_sparse_fwd

    ids, latent = token_ids(inputs, 128, -1).unsqueeze(1), inputs.latent.unsqueeze(1)

    def call() -> Outputs:
        out, _, lse = flash_mla_sparse_fwd(inputs.q, latent, ids, SETTINGS["scale"])
        return {"out": out, "lse": lse * torch.log(torch.tensor(2.0)).item()}

    return Runnable(call=call)


def with_zero_tail(x: torch.Tensor) -> torch.Tensor:
    """(1, ..., 576): what TileLang's example takes for 512 columns."""
    return torch.nn.functional.pad(x, (0, 64)).unsqueeze(0).contiguous()


def _tilelang_example(inputs: Inputs, device: Device) -> Runnable:
    from sparse_mla_fwd import sparse_mla_fwd_interface

    ids = token_ids(inputs, 64, len(inputs.latent))[None, :, None].contiguous()
    q, latent = with_zero_tail(inputs.q), with_zero_tail(inputs.latent.unsqueeze(1))

    def call() -> Outputs:
        out, lse = sparse_mla_fwd_interface(q, latent, ids, sm_scale=SETTINGS["scale"])
        return {"out": out[0], "lse": lse[0] * torch.log(torch.tensor(2.0)).item()}

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


def peer(name: str, build: Callable[..., Runnable], package: str) -> Variant:
    """A kernel of others, if its package is there."""
    return Variant(name=name, role="peer", build=build, requires=(package,), devices=("cuda",))


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
        Variant(name="plain torch", role="ours", build=_plain),
        peer("flash_mla", _flash_mla, "flash_mla"),
        peer("tilelang_example", _tilelang_example, "sparse_mla_fwd"),
    ),
)
