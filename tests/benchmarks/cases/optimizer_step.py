"""One step of AdamW whose fp32 masters and moments are in host memory.

Ours, through the device, by the CPU, and both at a measured split, against what can be written with
torch in a few lines, and against a device that has room for everything.

Shapes: P parameters in layers of width H (three matrices [3 H, H], four [H, H], two vectors [H]),
the last matrix cut short; buckets of at most B parameters. Working weights are bf16 and gradients
fp32, both on the device. Every variant uses as many CPU threads as there are cores near the device.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from components.offload.cores import threads
from components.offload.slabs import Slab, cpus_near
from components.streamed_adamw.host import host_bytes
from components.streamed_adamw.layout import lay_out
from components.streamed_adamw.optimizer import OffloadStreamAdamW
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device

RATES = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 9
"""Updates before the one that is measured, so that both moments count in its result."""

SAMPLE = 2**16
"""Values of each parameter that are compared."""

SLOTS = 2


@dataclass(kw_only=True, slots=True)
class Inputs:
    """gradients: fp32; weights: bf16, shared by all variants; both like the parameters, of
    ``counts`` values. Masters and moments are drawn anew for each variant: see ``drawn``."""

    counts: Sequence[int]
    bucket: int
    gradients: list[torch.Tensor]
    weights: list[torch.Tensor]
    device: torch.device
    seed: int
    stage: Stage

    def drawn(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Master, exp_avg and exp_avg_sq of one parameter after the other: fp32 on the device."""
        for number, count in enumerate(self.counts):
            random = torch.Generator(device=self.device).manual_seed(self.seed + number)
            draws = (torch.randn(count, generator=random, device=self.device) for _ in range(3))
            yield next(draws), next(draws).mul_(0.1), next(draws).square_().mul_(0.1)


def counts_of(parameters: int, width: int) -> list[int]:
    """Sizes of so many parameters in all."""
    layer = [3 * width**2] * 3 + [width**2] * 4 + [width] * 2
    counts: list[int] = []
    while (left := parameters - sum(counts)) > 0:
        counts.append(min(layer[len(counts) % len(layer)], left))
    return counts


def make_inputs(size: Size, device: Device, seed: int, stage: Stage) -> Inputs:
    """Random gradients; working weights that the first refresh overwrites."""
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
    counts = counts_of(size.shape["P"], size.shape["H"])
    random = torch.Generator(device=where).manual_seed(seed)
    return Inputs(
        counts=counts,
        bucket=size.shape["B"],
        gradients=[torch.randn(count, generator=random, device=where) for count in counts],
        weights=[torch.zeros(count, device=where, dtype=torch.bfloat16) for count in counts],
        device=torch.device(where),
        seed=seed,
        stage=stage,
    )


def _outputs(
    inputs: Inputs,
    masters: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
) -> Outputs:
    """What is compared. Timed calls leave it at a glance: sampling costs more than it should."""
    if inputs.stage == "timing":
        return {"weights": inputs.weights[-1][-1]}
    results = {
        "weights": inputs.weights,
        "masters": masters,
        "exp_avg": exp_avgs,
        "exp_avg_sq": exp_avg_sqs,
    }
    return {name: torch.cat([_sample(t, inputs) for t in each]) for name, each in results.items()}


def _sample(tensor: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Values at even distances, and the last."""
    flat = tensor.detach()
    distance = max(1, -(-tensor.numel() // SAMPLE))
    return torch.cat([flat[::distance], flat[-1:]]).to(inputs.device)


def reference(inputs: Inputs) -> Outputs:
    """The update as published, in float64, of the values that are compared."""
    lr, eps, decay = (RATES[key] for key in ("lr", "eps", "weight_decay"))
    beta1, beta2 = RATES["betas"]  # type: ignore[misc]
    results: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("weights", "masters", "exp_avg", "exp_avg_sq")
    }
    for gradient, drawn in zip(inputs.gradients, inputs.drawn(), strict=True):
        g, p, m, v = (_sample(t, inputs).double() for t in (gradient, *drawn))
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        unbiased = (m / (1 - beta1 ** (STEP + 1)), v / (1 - beta2 ** (STEP + 1)))
        p = p * (1 - lr * decay) - lr * unbiased[0] / (unbiased[1].sqrt() + eps)
        for name, value in zip(results, (p, p, m, v), strict=True):
            results[name].append(value)
    return {name: torch.cat(each) for name, each in results.items()}


def tolerance(size: Size) -> dict[str, float]:
    """Roundings of bf16 and of fp32."""
    return {"weights": 2e-3, "masters": 2e-7, "exp_avg": 2e-7, "exp_avg_sq": 2e-7}


def floor(size: Size, machine: Machine) -> Floor:
    """On a GPU 12 bytes per parameter over the link in each direction, both at once."""
    count = size.shape["P"]
    link = machine.ceilings.both_ways_gbps
    if link is None:
        return roofline(
            machine, dtype="float32", flops=15.0 * count, flops_text=f"15 x {count}",
            nbytes=30.0 * count,
            bytes_text=f"master, moments read and written, gradient, weight: 30 B x {count}",
        )  # fmt: skip
    return Floor(
        ms=12 * count / link / 1e6,
        arithmetic=(
            f"streaming everything: 12 B x {count} = {12 * count / 1e9:.4g} GB up and as much down "
            f"at {link:.4g} GB/s each way; what the CPU updates takes 4 B each way instead, and "
            "state on the device nothing"
        ),
        ceiling="memory",
    )


@cache
def _host(use: str, nbytes: int, device: torch.device) -> Slab:
    """Host memory that variants take turns in: together they would need more than there is."""
    return Slab(nbytes, device, cpus_near(device))


def _threads(inputs: Inputs) -> int:
    return threads("cpu_threads", None, inputs.device)


def _state(inputs: Inputs) -> Slab:
    nbytes = host_bytes(lay_out(inputs.counts), inputs.bucket, processor=True)
    return _host("state", nbytes, inputs.device)


def _ours(split: float | str) -> Callable[[Inputs, Device], Runnable]:
    def build(inputs: Inputs, device: Device) -> Runnable:
        parameters = [nn.Parameter(master) for master, _, _ in inputs.drawn()]
        optimizer = OffloadStreamAdamW(
            parameters, host=lambda nbytes: _state(inputs), bucket_parameters=inputs.bucket,
            slots=SLOTS, split=split, threads=_threads(inputs), **RATES,
        )  # type: ignore[arg-type]  # fmt: skip
        if optimizer.measured is not None:
            print(f"        measured: {optimizer.measured}", file=sys.stderr, flush=True)
        for number, (parameter, (_, *moments)) in enumerate(
            zip(parameters, inputs.drawn(), strict=True)
        ):
            state = optimizer.state[parameter]
            state["step"].fill_(STEP)
            for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                state[name].copy_(moment)
            parameter.data = inputs.weights[number]
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
            parameter.grad = inputs.gradients[number]

        def call() -> Outputs:
            optimizer.step()
            states = [optimizer.state[parameter] for parameter in parameters]
            moments = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq"))
            return _outputs(inputs, list(optimizer.masters.values()), *moments)

        return Runnable(call=call, cleanup=optimizer.close)

    return build


def _adamw(
    inputs: Inputs, masters: Sequence[torch.Tensor], moments: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    """Torch's own on the memory given."""
    parameters = [nn.Parameter(master) for master in masters]
    optimizer = torch.optim.AdamW(parameters, fused=True, **RATES)  # type: ignore[arg-type]
    for parameter, exp_avg, exp_avg_sq in zip(parameters, *moments, strict=True):
        step = torch.tensor(float(STEP), device=parameter.device)
        optimizer.state[parameter] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return parameters, optimizer


def _on_device(inputs: Inputs, device: Device) -> Runnable:
    masters, *moments = map(list, zip(*inputs.drawn(), strict=True))
    parameters, optimizer = _adamw(inputs, masters, moments)
    for parameter, gradient in zip(parameters, inputs.gradients, strict=True):
        parameter.grad = gradient

    def call() -> Outputs:
        optimizer.step()
        for weight, parameter in zip(inputs.weights, parameters, strict=True):
            weight.copy_(parameter.detach())
        return _outputs(inputs, parameters, *moments)

    return Runnable(call=call)


def _copied(inputs: Inputs, device: Device) -> Runnable:
    """All gradients down, one update with all cores, all masters up and rounded there."""
    layout, slab = lay_out(inputs.counts), _state(inputs)
    rows = slab.view(0, 12 * layout.size).view(torch.float32).view(3, -1)
    arrived = _host("gradients", 4 * layout.size, inputs.device).view(0, 4 * layout.size)
    places = [
        slice(offset, offset + count)
        for offset, count in zip(layout.offsets, layout.counts, strict=True)
    ]
    masters, *moments = ([row[place] for place in places] for row in rows)
    for place, drawn in zip(places, inputs.drawn(), strict=True):
        for row, values in zip(rows, drawn, strict=True):
            row[place].copy_(values)
    parameters, optimizer = _adamw(inputs, masters, moments)
    for parameter, place in zip(parameters, places, strict=True):
        parameter.grad = arrived.view(torch.float32)[place]
    before = torch.get_num_threads()
    torch.set_num_threads(_threads(inputs))

    def call() -> Outputs:
        for parameter, gradient in zip(parameters, inputs.gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient, non_blocking=True)
        if inputs.device.type == "cuda":
            torch.cuda.synchronize()
        optimizer.step()
        for weight, parameter in zip(inputs.weights, parameters, strict=True):
            weight.copy_(parameter.detach().to(inputs.device, non_blocking=True))
        return _outputs(inputs, parameters, *moments)

    return Runnable(call=call, cleanup=lambda: torch.set_num_threads(before))


def _size(billions: int) -> Size:
    shape = {"P": billions * 10**9, "H": 4096, "B": 10**8}
    return Size(shape=shape, dtype="bfloat16", devices=("cuda",))


CASE = Case(
    name="optimizer_step",
    question="How fast is AdamW when its state is in host memory?",
    sizes={
        "small": Size(shape={"P": 2_000_000, "H": 128, "B": 300_000}, dtype="bfloat16"),
        "1b": _size(1),
        "2b": _size(2),
        "4b": _size(4),
    },
    inputs=make_inputs,
    reference=reference,
    tolerance=tolerance,
    floor=floor,
    variants=(
        Variant(name="streamed", role="ours", build=_ours(0.0)),
        Variant(name="CPU", role="ours", build=_ours(1.0)),
        Variant(name="split auto", role="ours", build=_ours("auto")),
        Variant(name="torch CPU fused, copies", role="peer", build=_copied),
        Variant(name="torch fused, all on the device", role="peer", build=_on_device),
    ),
)
