"""Layers recomputed in backward, their inputs on the device or in host memory meanwhile.

Shapes: hidden states [N, S x H] in L layers; N tokens, S residual streams of width H. A layer adds
a part of inner width F, computed from the streams' mean, to each; all layers share weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from components.offload.arena import aligned
from components.offload.engine import Engine
from components.offload.slabs import Slab, cpus_near
from components.offload.streams import lanes_for
from components.recompute.layer import RecomputedLayer
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device


@dataclass(kw_only=True, slots=True)
class Inputs:
    """hidden and pull, the output's gradient: [N, S x H]; up [H, F], down [F, H]."""

    hidden: torch.Tensor
    pull: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    layers: int


class Layer(nn.Module):
    """One layer; its parameters are handed in, so that layers can share them."""

    def __init__(self, up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, S x H] -> [N, S x H]."""
        streams = hidden.unflatten(1, (-1, self.up.shape[0]))
        part = F.silu(streams.mean(1) @ self.up) @ self.down
        return (streams + part.unsqueeze(1)).flatten(1)


def make_inputs(size: Size, device: Device, seed: int, stage: Stage) -> Inputs:
    """Random inputs; weights that keep the hidden states' scale."""
    n, s, h, f, layers = (size.shape[key] for key in "NSHFL")
    random = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, size.dtype)

    def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.randn(rows, columns, generator=random, device=device, dtype=dtype)
        return made.mul_(scale)

    return Inputs(
        hidden=draw(n, s * h),
        pull=draw(n, s * h),
        up=draw(h, f, h**-0.5),
        down=draw(f, h, f**-0.5),
        layers=layers,
    )


def _outputs(inputs: Inputs, run: Callable[[Sequence[Layer], torch.Tensor], torch.Tensor]) -> dict:
    """Output and gradients of one forward and backward."""
    leaf = inputs.hidden.detach().requires_grad_()
    up, down = nn.Parameter(inputs.up.detach()), nn.Parameter(inputs.down.detach())
    # Not the leaf itself: the first layer's input is computed, as a model's is.
    out = run([Layer(up, down) for _ in range(inputs.layers)], leaf * 1)
    out.backward(inputs.pull)
    return {"out": out.detach(), "dhidden": leaf.grad, "dup": up.grad, "ddown": down.grad}


def reference(inputs: Inputs) -> Outputs:
    """In float64, or float32 for bfloat16 inputs, with plain recomputation."""
    wide = torch.float64 if inputs.hidden.dtype == torch.float32 else torch.float32
    tensors = {k: getattr(inputs, k).to(wide) for k in ("hidden", "pull", "up", "down")}
    return _outputs(Inputs(**tensors, layers=inputs.layers), _recomputed)


def tolerance(size: Size) -> dict[str, float]:
    """In bfloat16 the hidden states are rounded after every layer, and so are their gradients."""
    limit = 1e-5 if size.dtype == "float32" else 5e-2
    return dict.fromkeys(("out", "dhidden", "dup", "ddown"), limit)


def floor(size: Size, machine: Machine) -> Floor:
    """Products of forward, recomputation and backward; hidden states go once each way."""
    n, s, h, f, layers = (size.shape[key] for key in "NSHFL")
    width = getattr(torch, size.dtype).itemsize
    return roofline(
        machine,
        dtype=size.dtype,
        flops=4 * 4.0 * n * h * f * layers,
        flops_text=f"4 passes x {layers} layers x 2 matmuls x 2 x {n} x {h} x {f}",
        nbytes=float(layers * 6 * n * s * h * width),
        bytes_text=f"{layers} layers x 3 passes, read and written: {n} x {s * h} x {width} B",
    )


def _recomputed(
    layers: Sequence[Layer], hidden: torch.Tensor, early_stop: bool = False
) -> torch.Tensor:
    """As torchtitan does it; torch's own default leaves a layer's last product out of the replay,
    which a layer under FSDP or expert parallelism, with work after it, cannot do."""
    for layer in layers:
        hidden = checkpoint(layer, hidden, use_reentrant=False, early_stop=early_stop)
    return hidden


def _saved_on_cpu(layers: Sequence[Layer], hidden: torch.Tensor) -> torch.Tensor:
    """The checkpoints' inputs alone: what is saved inside them is out of these hooks' sight."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return _recomputed(layers, hidden)


def _peer(run: Callable[[Sequence[Layer], torch.Tensor], torch.Tensor]) -> Callable:
    def build(inputs: Inputs, device: Device) -> Runnable:
        return Runnable(call=lambda: _outputs(inputs, run))

    return build


def _on_device(inputs: Inputs, device: Device) -> Runnable:
    def run(layers: Sequence[Layer], hidden: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            hidden = RecomputedLayer(layer)(hidden)
        return hidden

    return Runnable(call=lambda: _outputs(inputs, run))


def _offloaded(streams: bool, share: float = 1.0) -> Callable[[Inputs, Device], Runnable]:
    """
    Args:
        streams: copy beside the computation.
        share: of the layers' inputs that go to the host, the earliest.
    """

    def build(inputs: Inputs, device: Device) -> Runnable:
        where = inputs.hidden.device
        count = int(share * inputs.layers)
        slab = Slab(count * aligned(inputs.hidden.nbytes), where, cpus_near(where))
        engine = Engine(slab, lanes_for(where, streams), where, range(count))

        def run(layers: Sequence[Layer], hidden: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                recomputed = RecomputedLayer(layer)
                recomputed.store = engine
                hidden = recomputed(hidden)
            return hidden

        def call() -> Outputs:
            engine.begin()
            outputs = _outputs(inputs, run)
            engine.end()
            return outputs

        def cleanup() -> None:
            engine.close()
            slab.close()

        return Runnable(call=call, cleanup=cleanup)

    return build


CASE = Case(
    name="checkpoint_offload",
    question="What does keeping layer inputs on the host cost in time and save on the device?",
    sizes={
        "small": Size(shape={"N": 512, "S": 4, "H": 64, "F": 128, "L": 6}, dtype="float32"),
        "32k": Size(
            shape={"N": 32768, "S": 1, "H": 4096, "F": 12288, "L": 16},
            dtype="bfloat16",
            devices=("cuda",),
        ),
        "32k_mhc": Size(
            shape={"N": 32768, "S": 4, "H": 4096, "F": 12288, "L": 16},
            dtype="bfloat16",
            devices=("cuda",),
        ),
    },
    inputs=make_inputs,
    reference=reference,
    tolerance=tolerance,
    floor=floor,
    variants=(
        Variant(name="on the device", role="ours", build=_on_device),
        Variant(name="offloaded, in line", role="ours", build=_offloaded(False)),
        Variant(name="offloaded, streams", role="ours", build=_offloaded(True)),
        Variant(name="half offloaded, streams", role="ours", build=_offloaded(True, 0.5)),
        Variant(name="torch checkpoint", role="peer", build=_peer(_recomputed)),
        Variant(
            name="torch checkpoint, early stop",
            role="peer",
            build=_peer(partial(_recomputed, early_stop=True)),
        ),
        Variant(
            name="torch save_on_cpu, pinned",
            role="peer",
            build=_peer(_saved_on_cpu),
            devices=("cuda",),
        ),
    ),
)
