"""The benchmark harness: arithmetic, result files, command line."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.benchmarks import __main__ as cli
from tests.benchmarks import cases, report
from tests.benchmarks.fakes import (
    DATE,
    Call,
    QuickProbe,
    double,
    fake_case,
    finished,
    machine,
    report_of,
    run,
    steady,
    variant,
    variant_record,
)
from tests.benchmarks.harness import Result, run_case, summarise
from tests.benchmarks.machine import Ceilings, Floor, roofline
from tests.benchmarks.usage import UsageError, choose

# Arithmetic


def test_summary_of_repeats() -> None:
    timing = summarise([4.0, 1.0, 3.0, 2.0])
    assert (timing.median, timing.min, timing.max, timing.spread) == (2.5, 1.0, 4.0, 1.2)


def test_floor_is_the_slower_of_arithmetic_and_memory() -> None:
    def floor(flops: float, nbytes: float) -> Floor:
        return roofline(
            machine(), dtype="float32", flops=flops, flops_text="F", nbytes=nbytes, bytes_text="B"
        )

    slow_sums = floor(flops=4e9, nbytes=1e6)  # 4 GFLOP / 2 TFLOP/s, 1 MB / 10 GB/s
    assert slow_sums.ms == pytest.approx(2.0) and slow_sums.ceiling == "float32"
    assert slow_sums.arithmetic == (
        "F = 0.004 TFLOP at 2 TFLOP/s (float32) = 2 ms; B = 0.001 GB at 10 GB/s = 0.1 ms; "
        "bound by arithmetic"
    )
    slow_copy = floor(flops=4e9, nbytes=1e8)
    assert slow_copy.ms == pytest.approx(10.0) and slow_copy.ceiling == "memory"
    assert slow_copy.arithmetic.endswith("bound by memory")


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
    assert record["schema"] == 2
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
    ("tflops", "gbps", "moved"),
    [(2.1, 10.0, None), (2.0, 5.0, None), (1.0, 10.0, "-50%"), (2.4, 10.0, "+20%")],
)
def test_a_disturbed_machine_is_said_so(tflops: float, gbps: float, moved: str | None) -> None:
    after = Ceilings(matmul_tflops={"float32": tflops}, memory_gbps=gbps)
    measured = report_of(finished("a", "ours", [3.0]), ceilings_after=after)
    texts = report.to_text(measured), report.to_markdown(measured, "c", DATE)
    for text in texts:
        assert ("WARNING" in text) == (moved is not None)
        assert moved is None or f"its float32 ceiling moved by {moved} during the run" in text
    assert f"Ceilings after: float32 matmul {tflops:g} TFLOP/s" in texts[1]


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
    monkeypatch.setattr(cli, "run_case", partial(run_case, remeasure=steady))
    arguments = ["fake", "--device", "cpu", "--repeats", "2", "--out", str(tmp_path)]
    assert cli.main(arguments) == code
    assert len(list(tmp_path.iterdir())) == files
