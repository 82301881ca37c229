"""The benchmark harness: order of a run, gate, variants that cannot run, memory."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.benchmarks import probes, report
from tests.benchmarks.case import Device, Outputs, Runnable, Variant
from tests.benchmarks.fakes import (
    DATE,
    Call,
    QuickProbe,
    double,
    fake_case,
    machine,
    run,
    steady,
    variant,
    variant_record,
)
from tests.benchmarks.harness import GateError, Options, relative_error, run_case
from tests.benchmarks.machine import Ceilings
from tests.benchmarks.probes import CpuProbe, CudaProbe, Memory

# Order of the run


def test_variants_take_turns_after_each_was_gated_measured_and_warmed_up() -> None:
    order: list[str] = []

    def traced(name: str) -> Call:
        def call(x: torch.Tensor) -> Outputs:
            order.append(name)
            return double(x)

        return call

    run(*(variant(name, call=traced(name)) for name in "abc"), warmup=1, repeats=2)
    gate, memory, warmup, *timed = ("".join(order[i : i + 3]) for i in range(0, len(order), 3))
    assert (gate, memory, warmup) == ("abc", "abc", "abc")
    assert timed == ["abc", "abc"]


def test_all_repeats_are_kept_and_warm_up_is_not_among_them() -> None:
    measured = run(variant("a"), variant("b", "peer"), warmup=4, repeats=5)
    assert [len(result.times_ms) for result in measured.results] == [5, 5]


def test_gate_and_timing_inputs_differ() -> None:
    seen: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> Outputs:
        seen.append(x)
        return double(x)

    run(variant("a", call=call), warmup=0, repeats=1)
    gate, memory, timed = seen
    assert not torch.equal(gate, timed)
    assert memory is timed


def test_cleanup_runs_once_per_build() -> None:
    built, cleaned = [], []

    def build(x: torch.Tensor, device: Device) -> Runnable:
        built.append(1)
        return Runnable(call=lambda: double(x), cleanup=lambda: cleaned.append(1))

    run(Variant(name="a", role="ours", build=build))
    assert len(built) == len(cleaned) == 3  # gate, memory, timing


# Gate


def test_wrong_result_of_ours_refuses_every_speed() -> None:
    calls: list[int] = []

    def wrong(x: torch.Tensor) -> Outputs:
        calls.append(1)
        return {"y": 2.01 * x}

    with pytest.raises(
        GateError, match=r"(?s)fake: no speed reported.*bad: y error 0\.005 > 1e-06"
    ):
        run(variant("good"), variant("bad", call=wrong))
    assert len(calls) == 1


def test_wrong_peer_has_no_speed_and_is_not_the_best_peer() -> None:
    measured = run(
        variant("a"), variant("bad", "peer", lambda x: {"y": x}), variant("good", "peer")
    )
    bad = measured.results[1]
    assert (bad.status, bad.timing, bad.times_ms) == ("wrong", None, [])
    assert measured.best_peer is measured.results[2]


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(lambda x: {}, id="missing"),
        pytest.param(lambda x: {"y": 2 * x, "z": x}, id="unexpected"),
        pytest.param(lambda x: {"y": (2 * x)[:-1]}, id="shape"),
        pytest.param(lambda x: {"y": torch.full_like(x, math.nan)}, id="nan"),
        pytest.param(lambda x: {"y": torch.full_like(x, math.inf)}, id="inf"),
    ],
)
def test_gate_rejects(outputs: Call) -> None:
    with pytest.raises(GateError, match="error inf"):
        run(variant("a", call=outputs))


def test_relative_error_is_a_ratio_of_norms() -> None:
    reference = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf


# Variants that cannot run


def test_real_host_allocation_failure_is_recorded_and_the_others_go_on() -> None:
    def huge(x: torch.Tensor) -> Outputs:
        return {"y": torch.empty(1 << 60, dtype=torch.uint8)}

    measured = run(variant("huge", call=huge), variant("a"))
    huge_result, a = measured.results
    assert huge_result.status == "out of memory"
    assert huge_result.reason.startswith("gate: RuntimeError: ")
    assert a.timing is not None


def test_device_out_of_memory_after_the_gate_names_the_stage() -> None:
    calls: list[int] = []

    def call(x: torch.Tensor) -> Outputs:
        calls.append(1)
        if len(calls) == 4:  # gate, memory, warm-up, then this
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return double(x)

    measured = run(variant("a", call=call), variant("b"))
    assert measured.results[0].status == "out of memory"
    reason = "timing: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert measured.results[0].reason == reason
    assert measured.results[0].timing is None
    assert len(calls) == 4
    assert variant_record(measured, "a")["median_ms"] is None
    assert len(measured.results[1].times_ms) == 3


def test_exception_is_recorded_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(x: torch.Tensor) -> Outputs:
        raise ValueError("wants an even number of blocks")

    measured = run(variant("a"), variant("picky", "peer", refuse))
    picky = measured.results[1]
    assert picky.status == "failed"
    assert picky.reason == "gate: ValueError: wants an even number of blocks"
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("declared", "status", "reason"),
    [
        ({"requires": ("no_such_pkg",)}, "not installed", "needs no_such_pkg"),
        ({"devices": ("cuda",)}, "not supported", "needs cuda, this run is on cpu"),
        ({"dtypes": ("bfloat16",)}, "not supported", "takes bfloat16, not float32"),
    ],
)
def test_unavailable_peer_is_never_built(
    declared: dict[str, tuple[str, ...]], status: str, reason: str
) -> None:
    def build(x: torch.Tensor, device: Device) -> Runnable:
        raise AssertionError("built")

    peer = Variant(name="peer", role="peer", build=build, **declared)  # type: ignore[arg-type]
    measured = run(variant("a"), peer)
    assert (measured.results[1].status, measured.results[1].reason) == (status, reason)


def test_unreadable_memory_is_said_and_does_not_stop_the_timing() -> None:
    class Blind(QuickProbe):
        def memory(self, call: Callable[[], object]) -> Memory:
            raise PermissionError("clear_refs is hidden")

    measured = run_case(
        fake_case(variant("a")), "small", Blind(), machine(), Options(repeats=1), steady
    )
    record = variant_record(measured, "a")
    assert record["peak_bytes"] is None
    assert record["memory_reason"] == "not measured: clear_refs is hidden"
    assert record["median_ms"] is not None


# Memory


def test_cpu_peak_sees_what_a_call_allocates_and_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_RSS_CALLS", 1)
    nbytes = 64 * 2**20
    probe = CpuProbe()

    def call() -> None:
        torch.ones(nbytes, dtype=torch.uint8)

    first, second = probe.memory(call), probe.memory(lambda: None)
    slack = 4 * 2**20  # the kernel keeps resident-set counters per CPU and sums them lazily
    assert abs(first.peak - nbytes) < slack
    assert second.peak < slack
    assert first.reserved is None and first.resident > 0


def test_cpu_peak_is_the_median_reading_with_the_resident_set_it_was_read_from() -> None:
    class Noisy(CpuProbe):
        readings = iter([(9, 100), (1, 200), (5, 300), (7, 400), (3, 500)])

        def _read_once(self, call: Callable[[], object]) -> tuple[int, int]:
            return next(self.readings)

    assert Noisy().memory(lambda: None) == Memory(peak=5, reserved=None, resident=300)


def test_ceilings_are_measured_again_after_the_last_call() -> None:
    order: list[str] = []
    after = Ceilings(matmul_tflops={"float32": 4.0}, memory_gbps=8.0)

    def call(x: torch.Tensor) -> Outputs:
        order.append("call")
        return double(x)

    def measure(probe: object) -> Ceilings:
        order.append("ceilings")
        return after

    case, options = fake_case(variant("a", call=call)), Options(repeats=2)
    measured = run_case(case, "small", QuickProbe(), machine(), options, measure)
    assert order[-1] == "ceilings" and order.count("ceilings") == 1
    assert report.to_json(measured, "c", DATE)["machine"]["drift"] == {
        "float32": pytest.approx(1.0),
        "memory": pytest.approx(-0.2),
    }
    assert measured.floor.arithmetic.startswith("4e9 = 0.004 TFLOP at 4 TFLOP/s")
    assert "at 10 GB/s" in measured.floor.arithmetic


def test_case_needs_a_small_size_unique_names_and_one_of_ours() -> None:
    case = fake_case(variant("a"))
    with pytest.raises(ValueError, match="'small' that runs on the cpu"):
        replace(case, sizes={"full": case.sizes["small"]})
    with pytest.raises(ValueError, match="variant names repeat: a, a"):
        replace(case, variants=(variant("a"), variant("a")))
    with pytest.raises(ValueError, match="no variant has the role 'ours'"):
        replace(case, variants=(variant("a", "peer"),))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_probe_times_and_measures_the_device() -> None:
    probe = CudaProbe()
    a = torch.randn(4096, 4096, device="cuda")
    probe.flush()
    assert 0 < min(probe.time_ms(lambda: a @ a) for _ in range(3)) < 1e3
    memory = probe.memory(lambda: torch.empty(2**28, dtype=torch.uint8, device="cuda"))
    assert memory.peak - memory.resident == 2**28
    assert memory.reserved is not None and memory.reserved >= memory.peak
    here, options = replace(machine(), device="cuda"), Options(warmup=1, repeats=2)
    measured = run_case(fake_case(variant("a")), "small", probe, here, options, steady)
    assert len(measured.results[0].times_ms) == 2
