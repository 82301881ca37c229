"""Vocabulary projection + cross-entropy, forward and backward (loss, dX and dW).

torchtitan's ``ChunkedLossWrapper`` against the same loss on materialised logits and, where they are
installed, against the fused implementations people use instead.

Shapes: hidden states X [1, N, H], weight W [V, H], labels [1, N]; N tokens, hidden size H,
vocabulary V. Every variant divides by the number of valid labels, as the trainer does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from components.titan.device import use_device
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device

IGNORED = -100
_LOGIT_STD = 3.0
_REFERENCE_LOGIT_BYTES = 2**30


@dataclass(kw_only=True, slots=True)
class Inputs:
    """hidden [1, N, H] and weight [V, H] in the size's dtype, labels [1, N] int64, valid a
    scalar float32: the number of labels that are not ``IGNORED``."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor


def make_inputs(size: Size, device: Device, seed: int, stage: Stage) -> Inputs:
    """Random inputs; one label in 16 is ignored at the gate, none when timing (the floor's N)."""
    n, h, v = (size.shape[key] for key in "NHV")
    random = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, size.dtype)
    hidden = torch.randn(1, n, h, generator=random, device=device, dtype=dtype)
    weight = torch.randn(v, h, generator=random, device=device, dtype=dtype)
    # Logits of unit variance give a nearly flat softmax, whose part of the gradient is then too
    # small for the gate to notice that it is missing.
    weight *= _LOGIT_STD / h**0.5
    labels = torch.randint(v, (1, n), generator=random, device=device)
    if stage == "gate":
        labels[torch.rand(1, n, generator=random, device=device) < 1 / 16] = IGNORED
    valid = (labels != IGNORED).sum().float()
    return Inputs(hidden=hidden, weight=weight, labels=labels, valid=valid)


def reference(inputs: Inputs) -> Outputs:
    """Loss, dX [1, N, H] and dW [V, H] by the closed form, row block by row block.

    In float64 for float32 inputs, in float32 for bfloat16 ones.
    """
    wide = torch.float64 if inputs.hidden.dtype == torch.float32 else torch.float32
    hidden, weight = inputs.hidden[0].to(wide), inputs.weight.to(wide)
    labels = inputs.labels[0]
    loss = hidden.new_zeros(())
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    rows = max(1, _REFERENCE_LOGIT_BYTES // (weight.shape[0] * wide.itemsize))
    for start in range(0, hidden.shape[0], rows):
        block = slice(start, start + rows)
        keep = labels[block] != IGNORED
        index = labels[block].clamp(min=0).unsqueeze(1)
        log_p = torch.log_softmax(hidden[block] @ weight.T, dim=1)
        loss -= (log_p.gather(1, index).squeeze(1) * keep).sum()
        d_logits = log_p.exp_().scatter_add_(1, index, -torch.ones_like(index, dtype=wide))
        d_logits *= (keep.to(wide) / inputs.valid.to(wide)).unsqueeze(1)
        d_hidden[block] = d_logits @ weight
        d_weight.addmm_(d_logits.T, hidden[block])
    return {"loss": loss / inputs.valid.to(wide), "dX": d_hidden.unsqueeze(0), "dW": d_weight}


def tolerance(size: Size) -> dict[str, float]:
    """One unit of bfloat16 rounding is 4e-3; torchtitan and Liger add dW up in that dtype."""
    if size.dtype == "float32":
        return {"loss": 1e-5, "dX": 1e-4, "dW": 1e-4}
    return {"loss": 1e-3, "dX": 1e-2, "dW": 2e-2}


def floor(size: Size, machine: Machine) -> Floor:
    """Three matrix products (logits, dX, dW); X and W read, dX and dW written."""
    n, h, v = (size.shape[key] for key in "NHV")
    width = getattr(torch, size.dtype).itemsize
    return roofline(
        machine,
        dtype=size.dtype,
        flops=3 * 2.0 * n * h * v,
        flops_text=f"3 matmuls x 2 x {n} x {h} x {v}",
        nbytes=2.0 * width * h * (n + v),
        bytes_text=f"X, W, dX, dW: 2 x {width} B x {h} x ({n} + {v})",
    )


def _leaves(inputs: Inputs) -> tuple[torch.Tensor, nn.Parameter]:
    return inputs.hidden.detach().requires_grad_(), nn.Parameter(inputs.weight.detach())


def _backward(loss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> Outputs:
    """Backpropagate and hand the gradients over, so that nothing is kept between calls."""
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    outputs = {"loss": loss.detach(), "dX": hidden.grad, "dW": weight.grad}
    hidden.grad = weight.grad = None
    return outputs


def _lm_head(weight: nn.Parameter) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = weight
    return head


def _chunked(num_chunks: int) -> Callable[[Inputs, Device], Runnable]:
    def build(inputs: Inputs, device: Device) -> Runnable:
        use_device(device)
        from torchtitan.components.loss import ChunkedLossWrapper

        hidden, weight = _leaves(inputs)
        loss_fn = ChunkedLossWrapper.Config(num_chunks=num_chunks).build()
        loss_fn.set_lm_head(_lm_head(weight))

        def call() -> Outputs:
            loss, _ = loss_fn(hidden, inputs.labels, inputs.valid)
            return _backward(loss, hidden, weight)

        return Runnable(call=call)

    return build


def _materialised(inputs: Inputs, device: Device) -> Runnable:
    use_device(device)
    from torchtitan.components.loss import CrossEntropyLoss

    hidden, weight = _leaves(inputs)
    head = _lm_head(weight)
    loss_fn = CrossEntropyLoss.Config().build()

    def call() -> Outputs:
        # The logits are passed on unnamed, as in the trainer, so that backward can free them.
        loss, _ = loss_fn(head(hidden), inputs.labels, inputs.valid)
        return _backward(loss, hidden, weight)

    return Runnable(call=call)


def _liger(accumulate: torch.dtype | None) -> Callable[[Inputs, Device], Runnable]:
    def build(inputs: Inputs, device: Device) -> Runnable:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        hidden, weight = _leaves(inputs)
        # Its "mean" is over valid labels. Asking for "sum" and dividing would cost it one more
        # pass over both gradients, because it computes them in its forward.
        loss_fn = LigerFusedLinearCrossEntropyLoss(
            ignore_index=IGNORED, reduction="mean", accum_dtype=accumulate
        )

        def call() -> Outputs:
            loss = loss_fn(weight, hidden.flatten(0, 1), inputs.labels.flatten())
            return _backward(loss, hidden, weight)

        return Runnable(call=call)

    return build


def _cut_cross_entropy(inputs: Inputs, device: Device) -> Runnable:
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight = _leaves(inputs)

    def call() -> Outputs:
        # Its default drops gradient entries below 2.4e-4, which misses the gate (dX off by 1.5e-2).
        loss = linear_cross_entropy(
            hidden,
            weight,
            inputs.labels,
            ignore_index=IGNORED,
            reduction="mean",
            filter_eps=None,
            impl="cce",
        )
        return _backward(loss, hidden, weight)

    return Runnable(call=call)


CASE = Case(
    name="chunked_loss",
    question="What does torchtitan's chunked loss cost in time and save in memory?",
    sizes={
        "small": Size(shape={"N": 2048, "H": 256, "V": 8192}, dtype="float32"),
        "full": Size(
            shape={"N": 16384, "H": 7168, "V": 200000}, dtype="bfloat16", devices=("cuda",)
        ),
        "glm": Size(
            shape={"N": 32768, "H": 4096, "V": 154880}, dtype="bfloat16", devices=("cuda",)
        ),
    },
    inputs=make_inputs,
    reference=reference,
    tolerance=tolerance,
    floor=floor,
    variants=(
        Variant(name="chunked_8", role="ours", build=_chunked(8)),
        Variant(name="chunked_32", role="ours", build=_chunked(32)),
        Variant(name="materialised", role="peer", build=_materialised),
        Variant(
            name="liger",
            role="peer",
            build=_liger(None),
            requires=("liger_kernel",),
            devices=("cuda",),
        ),
        Variant(
            name="liger_fp32_dw",
            role="peer",
            build=_liger(torch.float32),
            requires=("liger_kernel",),
            devices=("cuda",),
        ),
        Variant(
            name="cut_cross_entropy_exact",
            role="peer",
            build=_cut_cross_entropy,
            requires=("cut_cross_entropy",),
            devices=("cuda",),
            dtypes=("bfloat16", "float16"),
        ),
    ),
)
