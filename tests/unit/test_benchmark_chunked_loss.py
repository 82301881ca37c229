"""The benchmark case ``chunked_loss``: its reference, its gate and its floor."""

from dataclasses import replace

import pytest
import torch

from tests.benchmarks.case import Size
from tests.benchmarks.cases import chunked_loss
from tests.benchmarks.fakes import QuickProbe, machine
from tests.benchmarks.harness import Options, relative_error, run_case
from tests.benchmarks.machine import Ceilings


def tiny_loss(dtype: str) -> Size:
    return Size(shape={"N": 96, "H": 16, "V": 50}, dtype=dtype)


def test_reference_equals_autograd_in_float64() -> None:
    inputs = chunked_loss.make_inputs(tiny_loss("float32"), "cpu", 3, "gate")
    assert 0 < inputs.valid.item() < 96
    hidden = inputs.hidden.double().requires_grad_()
    weight = inputs.weight.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy((hidden @ weight.T)[0], inputs.labels[0])
    loss.backward()
    outputs = chunked_loss.reference(inputs)
    for name, expected in (("loss", loss.detach()), ("dX", hidden.grad), ("dW", weight.grad)):
        assert expected is not None and relative_error(outputs[name], expected) < 1e-12


@pytest.mark.parametrize("rows", [1, 7, 96])
def test_reference_does_not_depend_on_its_row_blocks(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = chunked_loss.make_inputs(tiny_loss("float32"), "cpu", 3, "gate")
    whole = chunked_loss.reference(inputs)
    monkeypatch.setattr(chunked_loss, "_REFERENCE_LOGIT_BYTES", rows * 50 * 8)
    blocks = chunked_loss.reference(inputs)
    assert all(relative_error(blocks[name], whole[name]) < 1e-14 for name in whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_variants_pass_their_gate(dtype: str) -> None:
    case = replace(chunked_loss.CASE, sizes={"small": tiny_loss(dtype)})
    ceilings = Ceilings(matmul_tflops={dtype: 1.0}, memory_gbps=1.0)
    here = replace(machine(), ceilings=ceilings)
    options = Options(warmup=0, repeats=1)
    measured = run_case(case, "small", QuickProbe(), here, options, lambda probe: ceilings)
    ran = {result.variant.name for result in measured.results if result.timing is not None}
    assert {"chunked_8", "chunked_32", "materialised"} <= ran


def test_gate_notices_a_gradient_without_its_softmax_part() -> None:
    size = tiny_loss("bfloat16")
    inputs = chunked_loss.make_inputs(size, "cpu", 3, "gate")
    reference = chunked_loss.reference(inputs)
    keep = (inputs.labels != chunked_loss.IGNORED).unsqueeze(2)
    labels_only = -inputs.weight[inputs.labels.clamp(min=0)].float() * keep / inputs.valid
    error = relative_error(labels_only, reference["dX"])
    assert error > 5 * chunked_loss.tolerance(size)["dX"]


def test_floor_counts_three_products() -> None:
    size = chunked_loss.CASE.sizes["small"]
    floor = chunked_loss.floor(size, machine())
    assert floor.ms == pytest.approx(3 * 2 * 2048 * 256 * 8192 / 2e12 * 1e3)
    assert "3 matmuls x 2 x 2048 x 256 x 8192" in floor.arithmetic


def test_timing_inputs_have_no_ignored_label() -> None:
    inputs = chunked_loss.make_inputs(tiny_loss("float32"), "cpu", 3, "timing")
    assert inputs.valid.item() == 96
