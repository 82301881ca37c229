"""The benchmark harness, run on a case whose every variant takes microseconds."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from tests.benchmarks import __main__ as cli
from tests.benchmarks import cases, harness, probes, report
from tests.benchmarks.case import Case, Device, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.cases import chunked_loss
from tests.benchmarks.harness import (
    GateError,
    Options,
    Report,
    Result,
    relative_error,
    run_case,
    summarise,
)
from tests.benchmarks.machine import Ceilings, Machine, roofline
from tests.benchmarks.probes import CpuProbe, CudaProbe, Memory
from tests.benchmarks.usage import UsageError, choose

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
    options = Options(warmup=warmup, repeats=repeats)
    return run_case(fake_case(*variants), "small", QuickProbe(), machine(), options)


@pytest.fixture(autouse=True)
def steady_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement after a run takes a second; these tests use the made-up machine's."""
    monkeypatch.setattr(harness, "measure_ceilings", lambda probe: machine().ceilings)


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

    measured = run_case(fake_case(variant("a")), "small", Blind(), machine(), Options(repeats=1))
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


# Arithmetic


def test_summary_of_repeats() -> None:
    timing = summarise([4.0, 1.0, 3.0, 2.0])
    assert (timing.median, timing.min, timing.max, timing.spread) == (2.5, 1.0, 4.0, 1.2)


def test_floor_is_the_slower_of_arithmetic_and_memory() -> None:
    def floor(flops: float, nbytes: float) -> tuple[float, str]:
        result = roofline(
            machine(), dtype="float32", flops=flops, flops_text="F", nbytes=nbytes, bytes_text="B"
        )
        return result.ms, result.arithmetic

    ms, text = floor(flops=4e9, nbytes=1e6)  # 4 GFLOP / 2 TFLOP/s, 1 MB / 10 GB/s
    assert ms == pytest.approx(2.0)
    assert text == (
        "F = 0.004 TFLOP at 2 TFLOP/s (float32) = 2 ms; B = 0.001 GB at 10 GB/s = 0.1 ms; "
        "bound by arithmetic"
    )
    ms, text = floor(flops=4e9, nbytes=1e8)
    assert ms == pytest.approx(10.0)
    assert text.endswith("bound by memory")


def test_floor_refuses_a_dtype_without_a_ceiling() -> None:
    with pytest.raises(ValueError, match="no bfloat16 ceiling on cpu, only float32"):
        roofline(machine(), dtype="bfloat16", flops=1, flops_text="", nbytes=1, bytes_text="")


def test_ratios_use_medians_and_the_fastest_peer() -> None:
    measured = report_of(
        finished("a", "ours", [1.0, 3.0, 30.0]),
        finished("slow", "peer", [9.0, 9.0, 9.0]),
        finished("fast", "peer", [6.0, 6.0, 6.0]),
    )
    record = variant_record(measured, "a")
    assert report.to_json(measured, "cmd", DATE)["best_peer"] == "fast"
    assert record["ratio_to_best_peer"] == pytest.approx(0.5)
    assert record["ratio_to_floor"] == pytest.approx(1.5)  # the fake floor is 2 ms
    assert record["rounds_faster_than_best_peer"] == pytest.approx(2 / 3)
    assert variant_record(measured, "fast")["rounds_faster_than_best_peer"] is None


@pytest.mark.parametrize(
    ("slower_rounds", "cell"), [(0, "0.50"), (1, "0.50"), (2, "0.50 ~"), (5, "1.25 ~")]
)
def test_ratio_is_marked_when_rounds_disagree(slower_rounds: int, cell: str) -> None:
    mine = [4.0] * slower_rounds + [1.0] * (10 - slower_rounds)
    measured = report_of(finished("a", "ours", mine), finished("b", "peer", [2.0] * 10))
    row = next(
        line for line in report.to_markdown(measured, "c", DATE).splitlines() if "| a " in line
    )
    assert row.split(" | ")[7] == cell


# Output


def test_json_record_has_every_field_and_survives_a_round_trip(tmp_path: Path) -> None:
    measured = run(variant("a"), variant("b", "peer"), variant("c", "peer", requires=("no_pkg",)))
    path, _ = report.write(measured, tmp_path, "python -m tests.benchmarks fake", DATE)
    record = json.loads(path.read_text())
    assert path.name == "fake_acme-x1-2-cpus_small.json"
    assert record == report.to_json(measured, "python -m tests.benchmarks fake", DATE)
    assert record["schema"] == 1
    assert record["date"] == "2026-01-02T03:04:05+00:00"
    assert record["size"] == {"name": "small", "dtype": "float32", "shape": {"N": 4}}
    assert record["machine"]["facts"] == {"torch": "9.9"}
    assert record["machine"]["ceilings"]["matmul_tflops"] == {"float32": 2.0}
    assert record["floor"]["ms"] == pytest.approx(2.0)
    assert record["method"]["tolerance"] == {"y": 1e-6}
    assert (record["method"]["warmup"], record["method"]["repeats"]) == (1, 3)
    a, _, c = record["variants"]
    assert a["status"] == "ok" and len(a["times_ms"]) == 3 and a["errors"]["y"] <= 1e-6
    assert a["min_ms"] <= a["median_ms"] <= a["max_ms"] and a["first_call_ms"] > 0
    assert (a["peak_bytes"], a["reserved_bytes"], a["resident_bytes"]) == (3 * 2**20, None, 2**30)
    assert c["status"] == "not installed" and c["times_ms"] == [] and c["ratio_to_floor"] is None
    assert a.keys() == c.keys()


def test_json_has_no_infinity() -> None:
    measured = run(variant("a"), variant("bad", "peer", lambda x: {}))
    text = json.dumps(report.to_json(measured, "c", DATE), allow_nan=False)
    assert json.loads(text)["variants"][1]["errors"] == {"y": None}


def test_markdown_shows_command_floor_every_variant_and_all_repeats() -> None:
    measured = report_of(
        finished("a", "ours", [3.0, 4.0, 5.0]),
        finished("b", "peer", [2.0, 2.0, 2.5]),
        Result(variant=variant("c", "peer"), status="not installed", reason="needs c"),
    )
    text = report.to_markdown(measured, "python -m tests.benchmarks fake", DATE)
    assert "- Command: `python -m tests.benchmarks fake`" in text
    assert "- Floor: **2 ms** = 4e9 = 0.004 TFLOP at 2 TFLOP/s" in text
    assert "memory copy 10 GB/s (read + written)" in text
    assert "| a | ours | 4 | 3 | 5 | 50% | 2.00 | 2.00 | - | - | - |  |" in text
    assert "| c | peer |" in text and "not installed: needs c |" in text
    assert "- a: 3, 4, 5 (first call -)" in text
    assert "peak RSS delta" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize(
    ("tflops", "gbps", "moved"), [(2.0, 10.5, None), (1.0, 10.0, "50%"), (2.0, 12.0, "20%")]
)
def test_a_disturbed_machine_is_said_so(tflops: float, gbps: float, moved: str | None) -> None:
    after = Ceilings(matmul_tflops={"float32": tflops}, memory_gbps=gbps)
    measured = report_of(finished("a", "ours", [3.0]), ceilings_after=after)
    texts = report.to_text(measured), report.to_markdown(measured, "c", DATE)
    for text in texts:
        assert ("WARNING" in text) == (moved is not None)
        assert moved is None or f"ceilings moved by {moved} during the run" in text
    assert f"Ceilings after: float32 matmul {tflops:g} TFLOP/s" in texts[1]


def test_ceilings_are_measured_again_after_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    after = Ceilings(matmul_tflops={"float32": 4.0}, memory_gbps=8.0)

    def call(x: torch.Tensor) -> Outputs:
        order.append("call")
        return double(x)

    def measure(probe: object) -> Ceilings:
        order.append("ceilings")
        return after

    monkeypatch.setattr(harness, "measure_ceilings", measure)
    measured = run(variant("a", call=call))
    assert order[-1] == "ceilings" and order.count("ceilings") == 1
    assert report.to_json(measured, "c", DATE)["machine"]["drift"] == pytest.approx(1.0)
    assert measured.floor.arithmetic.startswith("4e9 = 0.004 TFLOP at 4 TFLOP/s")
    assert "at 10 GB/s" in measured.floor.arithmetic


def test_printed_table_lines_up() -> None:
    measured = report_of(finished("a", "ours", [3.0]), finished("longer", "peer", [12.345]))
    lines = report.to_text(measured).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("variant"))
    columns = {
        line.index(role) for line, role in zip(lines[header + 1 :], ("ours", "peer"), strict=False)
    }
    assert columns == {lines[header].index("role")}


# Command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chunked_los"], "NAME: unknown value 'chunked_los'; did you mean 'chunked_loss'?"),
        (["--size", "small"], "NAME: missing (legal: "),
        (
            ["chunked_loss", "--size", "smal"],
            "--size: unknown value 'smal'; did you mean 'small'? (legal: small, full, glm)",
        ),
        (
            ["chunked_loss", "--size", "full", "--device", "cpu"],
            "--size: 'full' of 'chunked_loss' runs on cuda, not on cpu (legal: small)",
        ),
        (
            ["chunked_loss", "--device", "cud"],
            "--device: unknown value 'cud'; did you mean 'cuda'?",
        ),
        (["chunked_loss", "--repeats", "0"], "--repeats: 0 is too few, at least 1"),
    ],
)
def test_usage_errors_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_unlike_anything_gets_no_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown value 'zzz' \(legal: small, full\)"):
        choose("zzz", ("small", "full"), "--size")


def test_cuda_without_a_gpu_says_what_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["chunked_loss", "--device", "cuda"]) == 2
    message = capsys.readouterr().err
    assert f"torch {torch.__version__}" in message and "CPUs, no GPU" in message


@pytest.mark.parametrize("arguments", [["--list"], []])
def test_list_has_one_line_per_case(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == cases.names()


@pytest.mark.parametrize(
    ("ours", "peer", "code", "files"),
    [
        (double, double, 0, 2),
        (double, lambda x: {"y": x}, 1, 2),
        (lambda x: {"y": x}, double, 1, 0),
        (lambda x: 1 / 0, double, 1, 2),
        (double, lambda x: 1 / 0, 0, 2),
    ],
    ids=["ok", "peer wrong", "ours wrong", "ours fails", "peer fails"],
)
def test_exit_code_and_files(
    ours: Call, peer: Call, code: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = fake_case(variant("a", call=ours), variant("b", "peer", peer))
    monkeypatch.setattr(cli.cases, "load", lambda name: case)
    monkeypatch.setattr(cli, "make_probe", lambda device: QuickProbe())
    monkeypatch.setattr(cli, "survey", lambda probe: machine())
    arguments = ["fake", "--device", "cpu", "--repeats", "2", "--out", str(tmp_path)]
    assert cli.main(arguments) == code
    assert len(list(tmp_path.iterdir())) == files


# Declarations and the first case


def test_case_needs_a_small_size_unique_names_and_one_of_ours() -> None:
    case = fake_case(variant("a"))
    with pytest.raises(ValueError, match="'small' that runs on the cpu"):
        replace(case, sizes={"full": case.sizes["small"]})
    with pytest.raises(ValueError, match="variant names repeat: a, a"):
        replace(case, variants=(variant("a"), variant("a")))
    with pytest.raises(ValueError, match="no variant has the role 'ours'"):
        replace(case, variants=(variant("a", "peer"),))


def tiny_loss(dtype: str) -> Size:
    return Size(shape={"N": 96, "H": 16, "V": 50}, dtype=dtype)


def test_chunked_loss_reference_equals_autograd_in_float64() -> None:
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
def test_chunked_loss_reference_does_not_depend_on_its_row_blocks(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = chunked_loss.make_inputs(tiny_loss("float32"), "cpu", 3, "gate")
    whole = chunked_loss.reference(inputs)
    monkeypatch.setattr(chunked_loss, "_REFERENCE_LOGIT_BYTES", rows * 50 * 8)
    blocks = chunked_loss.reference(inputs)
    assert all(relative_error(blocks[name], whole[name]) < 1e-14 for name in whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunked_loss_variants_pass_their_gate(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(chunked_loss.CASE, sizes={"small": tiny_loss(dtype)})
    ceilings = Ceilings(matmul_tflops={dtype: 1.0}, memory_gbps=1.0)
    here = replace(machine(), ceilings=ceilings)
    monkeypatch.setattr(harness, "measure_ceilings", lambda probe: ceilings)
    measured = run_case(case, "small", QuickProbe(), here, Options(warmup=0, repeats=1))
    ran = {result.variant.name for result in measured.results if result.timing is not None}
    assert {"chunked_8", "chunked_32", "materialised"} <= ran


def test_chunked_loss_gate_notices_a_gradient_without_its_softmax_part() -> None:
    size = tiny_loss("bfloat16")
    inputs = chunked_loss.make_inputs(size, "cpu", 3, "gate")
    reference = chunked_loss.reference(inputs)
    keep = (inputs.labels != chunked_loss.IGNORED).unsqueeze(2)
    labels_only = -inputs.weight[inputs.labels.clamp(min=0)].float() * keep / inputs.valid
    error = relative_error(labels_only, reference["dX"])
    assert error > 5 * chunked_loss.tolerance(size)["dX"]


def test_chunked_loss_floor_counts_three_products() -> None:
    size = chunked_loss.CASE.sizes["small"]
    floor = chunked_loss.floor(size, machine())
    assert floor.ms == pytest.approx(3 * 2 * 2048 * 256 * 8192 / 2e12 * 1e3)
    assert "3 matmuls x 2 x 2048 x 256 x 8192" in floor.arithmetic


def test_timing_inputs_of_chunked_loss_have_no_ignored_label() -> None:
    inputs = chunked_loss.make_inputs(tiny_loss("float32"), "cpu", 3, "timing")
    assert inputs.valid.item() == 96


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
    measured = run_case(fake_case(variant("a")), "small", probe, here, options)
    assert len(measured.results[0].times_ms) == 2
