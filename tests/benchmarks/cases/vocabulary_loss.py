"""The vocabulary loss on one device: projection, cross entropy, dX and dW.

Inputs, reference, floor and peers are those of ``chunked_loss``. The factor 1 / valid labels goes
into the gradients, as in a training; dW is in the dtype of its sums. Liger adds dW up in the
weight's dtype unless told otherwise: ``fused_*_bf16_dw`` does the same and is its equal, while
``fused_*`` with sums in float32 stands beside ``liger_fp32_dw``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from components.vocabulary.fused import fused
from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.move_activations import move_activations
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Variant
from tests.benchmarks.cases import chunked_loss
from tests.benchmarks.cases.chunked_loss import IGNORED, Inputs
from tests.benchmarks.probes import Device

_PLAIN_ROWS = 4096
_PEERS = {variant.name: variant for variant in chunked_loss.CASE.variants}


def _layout(inputs: Inputs) -> VocabularyLayout:
    return VocabularyLayout(len(inputs.weight), 1, 1)


def _new_dw(inputs: Inputs, low: bool) -> torch.Tensor:
    """What dW is added up in: the weight's own dtype if ``low``, else float32."""
    dtype = inputs.weight.dtype if low else torch.float32
    return torch.zeros_like(inputs.weight, dtype=dtype)


def _outputs(loss: torch.Tensor, dx: torch.Tensor, dw: torch.Tensor, inputs: Inputs) -> Outputs:
    return {"loss": loss / inputs.valid, "dX": dx.unsqueeze(0), "dW": dw}


def _fused(inputs: Inputs, device: Device, *, rows: int, low: bool = False) -> Runnable:
    def call() -> Outputs:
        dw = _new_dw(inputs, low)
        loss, dx = fused(
            inputs.hidden[0],
            inputs.weight,
            inputs.labels[0],
            _layout(inputs),
            None,
            scale=inputs.valid.reciprocal(),
            rows=rows,
            dw=dw,
        )
        assert dx is not None
        return _outputs(loss, dx, dw, inputs)

    return Runnable(call=call)


def _recomputed(inputs: Inputs, device: Device, *, rows: int) -> Runnable:
    """Log-probabilities first, gradients in a backward that computes every strip again."""

    def call() -> Outputs:
        dw, x = _new_dw(inputs, low=False), inputs.hidden[0].detach().requires_grad_()
        log_p, _ = move_activations(
            x, inputs.weight, inputs.labels[0], _layout(inputs), None, rows=rows, dw=dw
        )
        loss = -log_p.sum()
        (loss / inputs.valid).backward()
        assert x.grad is not None
        return _outputs(loss.detach(), x.grad, dw, inputs)

    return Runnable(call=call)


def _plain(inputs: Inputs, device: Device) -> Runnable:
    """What one would write: chunks of rows, float32 logits, gradients at once, dW in float32."""

    def call() -> Outputs:
        weight, labels = inputs.weight, inputs.labels[0]
        loss, dx = torch.zeros((), device=weight.device), torch.empty_like(inputs.hidden[0])
        dw = _new_dw(inputs, low=False)
        for start in range(0, len(labels), _PLAIN_ROWS):
            some = slice(start, start + _PLAIN_ROWS)
            x, keep = inputs.hidden[0, some], labels[some] != IGNORED
            index = labels[some].clamp(min=0).unsqueeze(1)
            log_p = torch.log_softmax((x @ weight.t()).float(), 1)
            loss -= (log_p.gather(1, index).squeeze(1) * keep).sum()
            grad = log_p.exp_().scatter_add_(1, index, -torch.ones_like(index, dtype=torch.float32))
            grad = grad.mul_((keep / inputs.valid).unsqueeze(1)).to(weight.dtype)
            dx[some] = grad @ weight
            dw += grad.t() @ x
        return _outputs(loss, dx, dw, inputs)

    return Runnable(call=call)


def _ours(name: str, build: Callable[..., Runnable], **settings: object) -> Variant:
    return Variant(name=name, role="ours", build=partial(build, **settings))


# On bfloat16 alone: with float32 inputs they would be the variants before them once more.
_LOW = {"dtypes": ("bfloat16",)}
CASE = Case(
    name="vocabulary_loss",
    question="What do loss and gradients from one visit to each strip of logits cost?",
    sizes={
        "small": Size(shape={"N": 2048, "H": 256, "V": 8192}, dtype="float32"),
        "a": Size(shape={"N": 16384, "H": 7168, "V": 200000}, dtype="bfloat16", devices=("cuda",)),
        "b": Size(shape={"N": 32768, "H": 7168, "V": 200000}, dtype="bfloat16", devices=("cuda",)),
        "c": Size(shape={"N": 32768, "H": 4096, "V": 154880}, dtype="bfloat16", devices=("cuda",)),
    },
    inputs=chunked_loss.make_inputs,
    reference=chunked_loss.reference,
    tolerance=chunked_loss.tolerance,
    floor=chunked_loss.floor,
    variants=(
        _ours("fused_1024", _fused, rows=1024),
        _ours("fused_2048", _fused, rows=2048),
        _ours("fused_4096", _fused, rows=4096),
        _ours("fused_8192", _fused, rows=8192),
        replace(_ours("fused_1024_bf16_dw", _fused, rows=1024, low=True), **_LOW),
        replace(_ours("fused_1536_bf16_dw", _fused, rows=1536, low=True), **_LOW),
        replace(_ours("fused_2048_bf16_dw", _fused, rows=2048, low=True), **_LOW),
        replace(_ours("fused_4096_bf16_dw", _fused, rows=4096, low=True), **_LOW),
        _ours("recomputed_4096", _recomputed, rows=4096),
        Variant(name="plain_torch_4096", role="peer", build=_plain),
        replace(_PEERS["chunked_8"], role="peer"),
        _PEERS["materialised"],
        _PEERS["liger"],
        _PEERS["liger_fp32_dw"],
        _PEERS["cut_cross_entropy_exact"],
    ),
)
