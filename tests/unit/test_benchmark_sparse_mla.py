"""The benchmark cases of sparse latent attention, on the CPU."""

from dataclasses import replace

import pytest

from tests.benchmarks.cases import sparse_mla, sparse_mla_backward
from tests.benchmarks.fakes import QuickProbe, machine
from tests.benchmarks.harness import Options, run_case
from tests.benchmarks.machine import Ceilings


@pytest.mark.parametrize("case", [sparse_mla.CASE, sparse_mla_backward.CASE], ids=lambda c: c.name)
def test_plain_variant_passes_its_gate(case: sparse_mla.Case) -> None:
    ceilings = Ceilings(matmul_tflops={"float32": 1.0}, memory_gbps=1.0)
    here = replace(machine(), ceilings=ceilings)
    options = Options(warmup=0, repeats=1)
    measured = run_case(case, "small", QuickProbe(), here, options, lambda probe: ceilings)
    ran = {result.variant.name for result in measured.results if result.timing is not None}
    assert ran == {"plain torch"}


def test_floors_are_those_of_a_full_selection() -> None:
    ceilings = Ceilings(matmul_tflops={"bfloat16": 790.0}, memory_gbps=4300.0)
    here = replace(machine(), ceilings=ceilings)
    size = sparse_mla.SIZES["128k"]
    # 2,050 keys a query but for the first ones; two and five products.
    assert sparse_mla.floor(size, here).ms == pytest.approx(44.2, abs=0.3)
    assert sparse_mla_backward.floor(size, here).ms == pytest.approx(110.6, abs=0.6)
