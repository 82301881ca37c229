"""A benchmark case whose every variant takes microseconds, for the harness's own tests."""

from collections.abc import Callable
from datetime import UTC, datetime

import torch

from tests.benchmarks import report
from tests.benchmarks.case import Case, Device, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.harness import Options, Report, Result, run_case
from tests.benchmarks.machine import Ceilings, Machine, roofline
from tests.benchmarks.probes import CpuProbe, Memory, Probe

DATE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
Call = Callable[[torch.Tensor], Outputs]


def machine() -> Machine:
    ceilings = Ceilings(matmul_tflops={"float32": 2.0}, memory_gbps=10.0)
    return Machine(
        device="cpu", name="Acme(R) X1 (2 CPUs)", facts={"torch": "9.9"}, ceilings=ceilings
    )


def double(x: torch.Tensor) -> Outputs:
    return {"y": 2 * x}


def variant(name: str, role: str = "ours", call: Call = double, **declared: object) -> Variant:
    def build(inputs: torch.Tensor, device: Device) -> Runnable:
        return Runnable(call=lambda: call(inputs))

    return Variant(name=name, role=role, build=build, **declared)  # type: ignore[arg-type]


def make_inputs(size: Size, device: Device, seed: int, stage: Stage) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size.shape["N"], generator=generator, device="cpu").to(device)


def fake_case(*variants: Variant) -> Case:
    return Case(
        name="fake",
        question="Is twice two times?",
        sizes={"small": Size(shape={"N": 4}, dtype="float32")},
        inputs=make_inputs,
        reference=lambda x: {"y": 2 * x.double()},
        tolerance=lambda size: {"y": 1e-6},
        floor=lambda size, machine: roofline(
            machine, dtype="float32", flops=4e9, flops_text="4e9", nbytes=1e6, bytes_text="1e6"
        ),
        variants=variants,
    )


def run(*variants: Variant, warmup: int = 1, repeats: int = 3) -> Report:
    """Run the fake case on a machine that stays as fast as ``machine()`` claims."""
    options = Options(warmup=warmup, repeats=repeats)
    case = fake_case(*variants)
    return run_case(case, "small", QuickProbe(), machine(), options, steady)


def steady(probe: Probe) -> Ceilings:
    """Ceilings after the run; measuring them for real takes a second."""
    return machine().ceilings


class QuickProbe(CpuProbe):
    """The CPU probe without its housekeeping, which costs far more than the fake variants."""

    def flush(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def memory(self, call: Callable[[], object]) -> Memory:
        call()
        return Memory(peak=3 * 2**20, reserved=None, resident=2**30)


def finished(name: str, role: str, times_ms: list[float]) -> Result:
    return Result(variant=variant(name, role), times_ms=times_ms)


def report_of(*results: Result, ceilings_after: Ceilings | None = None) -> Report:
    case = fake_case(*(result.variant for result in results))
    return Report(
        case=case,
        size_name="small",
        size=case.sizes["small"],
        machine=machine(),
        options=Options(),
        floor=case.floor(case.sizes["small"], machine()),
        results=list(results),
        probe=QuickProbe(),
        ceilings_after=ceilings_after or machine().ceilings,
    )


def variant_record(measured: Report, name: str) -> dict[str, object]:
    record = report.to_json(measured, "cmd", DATE)
    return next(entry for entry in record["variants"] if entry["name"] == name)
