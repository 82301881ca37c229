"""The benchmark case ``hyper_connections``."""

from dataclasses import replace

import pytest

from tests.benchmarks.case import Size
from tests.benchmarks.cases import hyper_connections
from tests.benchmarks.fakes import QuickProbe, machine
from tests.benchmarks.harness import Options, run_case
from tests.benchmarks.machine import Ceilings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_variants_pass_their_gate(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyper_connections, "_REFERENCE_TOKENS", 40)
    size = Size(shape={"T": 97, "n": 4, "D": 24}, dtype=dtype)
    case = replace(hyper_connections.CASE, sizes={"small": size})
    ceilings = Ceilings(matmul_tflops={dtype: 1.0}, memory_gbps=1.0)
    here = replace(machine(), ceilings=ceilings)
    measured = run_case(
        case, "small", QuickProbe(), here, Options(warmup=0, repeats=1), lambda probe: ceilings
    )
    ran = {result.variant.name for result in measured.results if result.timing is not None}
    assert ran == {"fused", "trimmed", "plain_torch"}


def test_the_floor_is_eight_times_the_streams_and_five_of_one() -> None:
    size = hyper_connections.CASE.sizes["128k"]
    ceilings = Ceilings(matmul_tflops={"bfloat16": 700.0}, memory_gbps=4000.0)
    found = hyper_connections.floor(size, replace(machine(), ceilings=ceilings))
    assert found.ceiling == "memory"
    assert found.ms == pytest.approx(131_072 * 37 * 8192 / 4000e9 * 1e3)
