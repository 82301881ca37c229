"""The benchmark case ``optimizer_step``: its reference, its gate and its floor."""

from dataclasses import replace

import pytest
import torch

from tests.benchmarks.case import Size
from tests.benchmarks.cases import optimizer_step
from tests.benchmarks.fakes import QuickProbe, machine
from tests.benchmarks.harness import Options, relative_error, run_case

TINY = Size(shape={"P": 7001, "H": 24, "B": 900}, dtype="bfloat16")


def test_parameters_add_up() -> None:
    assert sum(optimizer_step.counts_of(7001, 24)) == 7001
    assert optimizer_step.counts_of(7001, 24)[:4] == [1728, 1728, 1728, 576]


def test_reference_equals_torchs_unfused_adamw_in_float64() -> None:
    inputs = optimizer_step.make_inputs(TINY, "cpu", 3, "gate")
    expected = optimizer_step.reference(inputs)["masters"]
    found = []
    for gradient, (master, exp_avg, exp_avg_sq) in zip(
        inputs.gradients, inputs.drawn(), strict=True
    ):
        parameter = torch.nn.Parameter(master.double())
        optimizer = torch.optim.AdamW([parameter], foreach=False, **optimizer_step.RATES)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(optimizer_step.STEP)),
            "exp_avg": exp_avg.double(),
            "exp_avg_sq": exp_avg_sq.double(),
        }
        parameter.grad = gradient.double()
        optimizer.step()
        found += [parameter.detach(), parameter.detach()[-1:]]
    assert relative_error(torch.cat(found), expected) < 1e-14


def test_variants_pass_their_gate() -> None:
    case = replace(optimizer_step.CASE, sizes={"small": TINY})
    options = Options(warmup=0, repeats=1)
    ceilings = machine().ceilings
    measured = run_case(case, "small", QuickProbe(), machine(), options, lambda probe: ceilings)
    assert all(result.timing is not None for result in measured.results)


@pytest.mark.parametrize("name", ["masters", "exp_avg", "exp_avg_sq"])
def test_gate_notices_a_step_that_is_counted_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = optimizer_step.make_inputs(TINY, "cpu", 3, "gate")
    right = optimizer_step.reference(inputs)[name]
    monkeypatch.setattr(optimizer_step, "STEP", optimizer_step.STEP + 1)
    monkeypatch.setitem(optimizer_step.RATES, "betas", (0.9001, 0.9501))
    error = relative_error(optimizer_step.reference(inputs)[name], right)
    assert error > 5 * optimizer_step.tolerance(TINY)[name]


def test_floor_counts_the_link_both_ways_on_a_gpu() -> None:
    size = optimizer_step.CASE.sizes["2b"]
    ceilings = replace(machine().ceilings, both_ways_gbps=50.0)
    found = optimizer_step.floor(size, replace(machine(), ceilings=ceilings))
    assert found.ms == pytest.approx(480.0)
    assert "12 B x 2000000000" in found.arithmetic
