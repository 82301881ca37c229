"""The KDA core with its gate, forward and backward: what the plain form costs beside fla's kernels.

Shapes: q, k, v, raw gate [T, H, D], beta [T, H]; T tokens in two documents, H heads of width D.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from kernels.kda import chunked
from kernels.kda.recurrent import kda as recurrent_kda
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device

LOWER_BOUND = -5.0


@dataclass(kw_only=True, slots=True)
class Inputs:
    """Named as the arguments of ``kernels.kda.chunked.kda``; ``pull`` is the output's gradient."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    raw_gate: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    pull: torch.Tensor
    lengths: tuple[int, ...]


def make_inputs(size: Size, device: Device, seed: int, stage: Stage) -> Inputs:
    """Random inputs; two documents of unequal and odd length."""
    t, h, d = (size.shape[key] for key in "THD")
    dtype = getattr(torch, size.dtype)
    random = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device, dtype=torch.float32).to(of)

    return Inputs(
        q=draw(t, h, d),
        k=draw(t, h, d),
        v=draw(t, h, d),
        raw_gate=draw(t, h, d),
        beta=draw(t, h).sigmoid(),
        A_log=draw(h, of=torch.float32) / 2,
        dt_bias=draw(h * d, of=torch.float32) - 2,
        pull=draw(t, h, d),
        lengths=(t // 3 | 1, t - (t // 3 | 1)),
    )


def _gradients(kda: Callable[..., torch.Tensor], inputs: Inputs, dtype: torch.dtype | None = None):
    """Output and all seven gradients."""
    names = [field.name for field in fields(Inputs)][:7]
    leaves = {}
    for name in names:
        value = getattr(inputs, name).detach()
        leaves[name] = value.to(dtype or value.dtype).requires_grad_()
    out = kda(*leaves.values(), inputs.lengths, lower_bound=LOWER_BOUND)
    out.backward(inputs.pull.to(out.dtype))
    grads = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), **grads}


def reference(inputs: Inputs) -> Outputs:
    """Float64: token by token where that ends in a second, else in chunks (tested to agree)."""
    short = inputs.q.shape[0] <= 512
    return _gradients(recurrent_kda if short else chunked.kda, inputs, torch.float64)


def tolerance(size: Size) -> dict[str, float]:
    """bfloat16 rounds inputs of every product inside fla's kernels."""
    limit = 1e-4 if size.dtype == "float32" else 3e-2
    names = ("out", "dq", "dk", "dv", "draw_gate", "dbeta", "dA_log", "ddt_bias")
    return dict.fromkeys(names, limit)


def floor(size: Size, machine: Machine) -> Floor:
    """Chunked products in forward, twice that in backward; inputs, output, gradients moved once."""
    t, h, d = (size.shape[key] for key in "THD")
    width = getattr(torch, size.dtype).itemsize
    return roofline(
        machine,
        dtype=size.dtype,
        flops=3.0 * t * h * (10 * 64 * d + 6 * d * d + 64 * 64 * 2 / 3),
        flops_text=f"3 x {t} x {h} heads x (10 x 64 x {d} + 6 x {d}^2 + 64^2 x 2/3)",
        nbytes=float(width * t * h * d * 10),
        bytes_text=f"q, k, v, gate, out and their gradients: 10 x {width} B x {t} x {h} x {d}",
    )


def _plain(inputs: Inputs, device: Device) -> Runnable:
    return Runnable(call=lambda: _gradients(chunked.kda, inputs))


def _fla(inputs: Inputs, device: Device) -> Runnable:
    from kernels.kda import fla

    return Runnable(call=lambda: _gradients(fla.kda, inputs))


CASE = Case(
    name="kda",
    question="What does the plain form of KDA cost beside flash-linear-attention's kernels?",
    sizes={
        "small": Size(shape={"T": 300, "H": 2, "D": 32}, dtype="float32"),
        "8k": Size(shape={"T": 8192, "H": 64, "D": 128}, dtype="bfloat16", devices=("cuda",)),
        "32k": Size(shape={"T": 32768, "H": 64, "D": 128}, dtype="bfloat16", devices=("cuda",)),
    },
    inputs=make_inputs,
    reference=reference,
    tolerance=tolerance,
    floor=floor,
    variants=(
        Variant(name="plain torch (chunked)", role="ours", build=_plain),
        Variant(
            name="fla chunk_kda", role="peer", build=_fla, requires=("fla",), devices=("cuda",)
        ),
    ),
)
