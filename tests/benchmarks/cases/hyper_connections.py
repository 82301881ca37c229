"""One site of the residual streams (mHC): reading them before a mixer, writing back, and gradients.

The mixer itself is left out: its output Y and the gradient of its input x are given.

Shapes: streams X [1, T, n, D], Y and x [1, T, D], fn [n^2 + 2n, n D]; base and scale in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from components.titan.device import use_device
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device

_ITERATIONS, _EPS, _NORM_EPS = 20, 1e-6, 1e-5
_REFERENCE_TOKENS = 4096


@dataclass(kw_only=True, slots=True)
class Inputs:
    """X, Y, fn and the gradients of x and of the merged streams in the size's dtype; base [m] and
    scale [3] in float32."""

    streams: torch.Tensor
    out: torch.Tensor
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    dx: torch.Tensor
    dmerged: torch.Tensor


def make_inputs(size: Size, device: Device, seed: int, stage: Stage) -> Inputs:
    """Random inputs with logits of unit size; at the gate streams of a token differ in size."""
    t, n, d = (size.shape[key] for key in "TnD")
    random, dtype = torch.Generator(device=device).manual_seed(seed), getattr(torch, size.dtype)
    normal = partial(torch.randn, generator=random, device=device)
    streams = normal(1, t, n, d, dtype=dtype)
    if stage == "gate":
        streams *= normal(1, t, n, 1).exp().to(dtype)
    return Inputs(
        streams=streams,
        out=normal(1, t, d, dtype=dtype),
        fn=normal(n * n + 2 * n, n * d, dtype=dtype) * (n * d) ** -0.5,
        base=normal(n * n + 2 * n),
        scale=normal(3),
        dx=normal(1, t, d, dtype=dtype),
        dmerged=normal(1, t, n, d, dtype=dtype),
    )


def reference(inputs: Inputs) -> Outputs:
    """The plain site on wider inputs, some tokens at a time: float64 for float32, else float32."""
    wide = torch.float64 if inputs.streams.dtype == torch.float32 else torch.float32
    shared = {name: getattr(inputs, name).to(wide) for name in ("fn", "base", "scale")}
    parts: dict[str, list[torch.Tensor]] = {}
    for begin in range(0, inputs.streams.shape[1], _REFERENCE_TOKENS):
        some = slice(begin, begin + _REFERENCE_TOKENS)
        rows = ("streams", "out", "dx", "dmerged")
        cut = {name: getattr(inputs, name)[:, some].to(wide) for name in rows}
        for name, value in _run(_site(inputs, "plain", wide), Inputs(**cut, **shared)).items():
            parts.setdefault(name, []).append(value)
    summed = ("dfn", "dbase", "dscale")
    return {
        name: torch.stack(found).sum(0) if name in summed else torch.cat(found, 1)
        for name, found in parts.items()
    }


def tolerance(size: Size) -> dict[str, float]:
    """One unit of bfloat16 rounding is 4e-3; plain torch rounds at every step."""
    names = ("x", "merged", "dX", "dY", "dfn", "dbase", "dscale")
    if size.dtype == "float32":
        return dict.fromkeys(names, 2e-5)
    return {**dict.fromkeys(names, 1e-2), "dfn": 2e-2, "dbase": 2e-2, "dscale": 5e-2}


def floor(size: Size, machine: Machine) -> Floor:
    """Four visits, as the mixer lies between reading and writing, forward and backward.

    S bytes of streams and s of one: X to x; X, Y to merged; dmerged, X, Y to dY; dx, X and what
    came back from writing to dX.
    """
    t, n, d = (size.shape[key] for key in "TnD")
    one, m = t * d * getattr(torch, size.dtype).itemsize, n * n + 2 * n
    return roofline(
        machine,
        dtype=size.dtype,
        flops=3 * 2.0 * t * m * n * d + 3 * 2.0 * t * n * d * (n + 2),
        flops_text=f"3 x 2 x {t} x {n} x {d} x ({m} + {n} + 2)",
        nbytes=one * (8 * n + 5),
        bytes_text=f"(S + s) + (2S + s) + (2S + 2s) + (3S + s) of s = {one / 1e6:.4g} MB, S = {n}s",
    )


def _site(inputs: Inputs, kind: str, wide: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model's module, with parameters not set."""
    from components.models.glm_flash.fused_connections import triton_hyper_connections
    from components.models.glm_flash.hyper_connections import HyperConnection, MixAffine
    from components.models.glm_flash.trimmed import SITES, trimmed

    n, d = inputs.streams.shape[2:]
    config = HyperConnection.Config(
        dim=d, streams=n, sinkhorn_iters=_ITERATIONS, eps=_EPS, norm_eps=_NORM_EPS,
        affine=MixAffine.Config(streams=n),
    )  # fmt: skip
    if kind == "trimmed":
        config = trimmed(config, SITES["hyper_connections"][HyperConnection.Config])
    if kind == "fused":
        config = triton_hyper_connections(config)
    with torch.device("meta"):
        return config.build()


def _run(site: torch.nn.Module, inputs: Inputs) -> Outputs:
    """Forward and backward; parameters are leaves made here, and nothing is kept."""
    leaf = torch.nn.Parameter
    site.fn, site.affine.base = leaf(inputs.fn.detach()), leaf(inputs.base.detach())
    site.affine.scale = leaf(inputs.scale.detach())
    streams, out = (t.detach().requires_grad_() for t in (inputs.streams, inputs.out))
    x, held, post, mix = site(streams)
    merged = site.write(held, out, post, mix)
    leaves = (streams, out, site.fn, site.affine.base, site.affine.scale)
    grads = torch.autograd.grad((merged, x), leaves, (inputs.dmerged, inputs.dx))
    names = ("dX", "dY", "dfn", "dbase", "dscale")
    return {"x": x.detach(), "merged": merged.detach(), **dict(zip(names, grads, strict=True))}


def _build(kind: str) -> Callable[[Inputs, Device], Runnable]:
    def build(inputs: Inputs, device: Device) -> Runnable:
        use_device(device)
        site = _site(inputs, kind)
        return Runnable(call=lambda: _run(site, inputs))

    return build


def _published(tokens: int) -> Size:
    return Size(shape={"T": tokens, "n": 4, "D": 4096}, dtype="bfloat16", devices=("cuda",))


CASE = Case(
    name="hyper_connections",
    question="What does one site of four residual streams cost, forward and backward?",
    sizes={
        "small": Size(shape={"T": 1025, "n": 4, "D": 256}, dtype="float32"),
        "8k": _published(8192),
        "32k": _published(32_768),
        "128k": _published(131_072),
    },
    inputs=make_inputs,
    reference=reference,
    tolerance=tolerance,
    floor=floor,
    variants=(
        # On a CPU its definition in plain torch.
        Variant(name="fused", role="ours", build=_build("fused")),
        Variant(name="trimmed", role="ours", build=_build("trimmed")),
        Variant(name="plain_torch", role="peer", build=_build("plain")),
    ),
)
