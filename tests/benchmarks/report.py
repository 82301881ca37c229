"""Turn a Report into a printed table, a JSON record and a Markdown page."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Report, Result
from tests.benchmarks.machine import Ceilings, drift

SCHEMA_VERSION = 2
_GIB = 2**30
_AGREEMENT = 0.9
_QUIET = 0.1
_LEGEND = (
    "x floor and x best peer are ratios of medians (below 1 is faster); spread is (max - min) / "
    f"median; ~ fewer than {_AGREEMENT:.0%} of the rounds agree on which of the two is faster"
)


def to_json(report: Report, command: str, date: datetime) -> dict[str, Any]:
    """The full record: plain JSON types, times in ms, memory in bytes, None where not measured."""
    peer = report.best_peer
    return {
        "schema": SCHEMA_VERSION,
        "case": report.case.name,
        "question": report.case.question,
        "command": command,
        "date": date.astimezone(UTC).isoformat(timespec="seconds"),
        "size": {
            "name": report.size_name,
            "dtype": report.size.dtype,
            "shape": dict(report.size.shape),
        },
        "machine": {
            "device": report.machine.device,
            "name": report.machine.name,
            "facts": dict(report.machine.facts),
            "ceilings": asdict(report.machine.ceilings),
            "ceilings_after": asdict(report.ceilings_after),
            "drift": drift(report.machine.ceilings, report.ceilings_after),
        },
        "method": {
            **asdict(report.options),
            "clock": report.probe.clock_label,
            "peak": report.probe.peak_label,
            "tolerance": dict(report.case.tolerance(report.size)),
        },
        "floor": asdict(report.floor),
        "best_peer": peer.variant.name if peer else None,
        "variants": [_variant_json(report, result) for result in report.results],
    }


def _variant_json(report: Report, result: Result) -> dict[str, Any]:
    timing, memory = result.timing, result.memory
    return {
        "name": result.variant.name,
        "role": result.variant.role,
        "status": result.status,
        "reason": result.reason,
        # JSON has no infinity: an error that is not a finite number is recorded as null.
        "errors": {k: v if v < float("inf") else None for k, v in sorted(result.errors.items())},
        "first_call_ms": result.first_call_ms,
        "times_ms": list(result.times_ms),
        "median_ms": timing.median if timing else None,
        "min_ms": timing.min if timing else None,
        "max_ms": timing.max if timing else None,
        "spread": timing.spread if timing else None,
        "ratio_to_floor": timing.median / report.floor.ms if timing else None,
        "ratio_to_best_peer": ratio_to_best_peer(report, result),
        "rounds_faster_than_best_peer": rounds_faster(report, result),
        "peak_bytes": memory.peak if memory else None,
        "reserved_bytes": memory.reserved if memory else None,
        "resident_bytes": memory.resident if memory else None,
        "memory_reason": result.memory_reason,
    }


def ratio_to_best_peer(report: Report, result: Result) -> float | None:
    """Median over the best peer's median: below 1 is faster. None if either was not timed."""
    peer = report.best_peer
    if peer is None or peer.timing is None or result.timing is None:
        return None
    return result.timing.median / peer.timing.median


def rounds_faster(report: Report, result: Result) -> float | None:
    """Share of rounds in which the variant beat the best peer's call of the same round.

    None for the best peer itself and where either was not timed.
    """
    peer = report.best_peer
    if peer is None or peer is result or result.timing is None:
        return None
    pairs = list(zip(result.times_ms, peer.times_ms, strict=True))
    return sum(mine < theirs for mine, theirs in pairs) / len(pairs)


def to_text(report: Report) -> str:
    """The table for a terminal, with the floor above it."""
    rows = _rows(report)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        f"{report.case.name}: {report.case.question}",
        f"size {report.size_name} ({report.size}) on {report.machine.name}",
        f"floor {report.floor.ms:.4g} ms: {report.floor.arithmetic}",
        f"{report.probe.peak_column}: {report.probe.peak_label}",
        "",
    ]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "", _LEGEND, *disturbance(report)])


def disturbance(report: Report) -> list[str]:
    """One line of warning if the ceiling under the floor moved during the run, else nothing."""
    ceiling = report.floor.ceiling
    moved = drift(report.machine.ceilings, report.ceilings_after)[ceiling]
    if abs(moved) <= _QUIET:
        return []
    return [
        f"WARNING: the machine was not quiet, its {ceiling} ceiling moved by {moved:+.0%} during "
        "the run; do not quote these times"
    ]


def to_markdown(report: Report, command: str, date: datetime) -> str:
    """The page committed beside the JSON record."""
    record = to_json(report, command, date)
    facts = ", ".join(f"{key} {value}" for key, value in record["machine"]["facts"].items())
    lines = [
        f"# {report.case.name}, {report.size_name}, {report.machine.name}",
        "",
        report.case.question,
        "",
        f"- Command: `{command}`",
        f"- Date: {record['date']}",
        f"- Size: {report.size}",
        f"- Machine: {facts}",
        f"- Ceilings before: {_ceilings_text(report.machine.ceilings)}",
        f"- Ceilings after: {_ceilings_text(report.ceilings_after)}",
        f"- Floor: **{report.floor.ms:.4g} ms** = {report.floor.arithmetic}",
        f"- Method: {report.options.warmup} warm-up and {report.options.repeats} timed rounds, "
        f"variants in turns; {report.probe.clock_label}; seed {report.options.seed}",
        f"- {report.probe.peak_column}: {report.probe.peak_label}; untimed, each variant alone",
        f"- Gate: relative error against the reference, allowed {_tolerance_text(report)}",
        "",
        *(f"**{line}**\n" for line in disturbance(report)),
        _markdown_table(_rows(report)),
        "",
        f"{_LEGEND}.",
        "",
        "All repeats, ms, in the order they ran:",
        "",
    ]
    for result in report.results:
        if result.timing is not None:
            times = ", ".join(f"{value:.4g}" for value in result.times_ms)
            lines.append(f"- {result.variant.name}: {times} (first call {_first_call(result)})")
    return "\n".join(lines) + "\n"


def write(report: Report, folder: Path, command: str, date: datetime) -> list[Path]:
    """Write ``<case>_<machine>_<size>.json`` and ``.md`` into ``folder``; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{report.case.name}_{report.machine.slug}_{report.size_name}"
    record = json.dumps(to_json(report, command, date), indent=2, allow_nan=False)
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(record + "\n")
    paths[1].write_text(to_markdown(report, command, date))
    return paths


def _rows(report: Report) -> list[tuple[str, ...]]:
    header = (
        "variant",
        "role",
        "median ms",
        "min",
        "max",
        "spread",
        "x floor",
        "x best peer",
        report.probe.peak_column,
        "peak reserved",
        "worst error",
        "note",
    )
    return [header, *(_row(report, result) for result in report.results)]


def _row(report: Report, result: Result) -> tuple[str, ...]:
    timing = result.timing
    name, role = result.variant.name, result.variant.role
    error = f"{max(result.errors.values()):.1e}" if result.errors else "-"
    if timing is None:
        note = f"{result.status}: {result.reason}"
        return (name, role, *["-"] * 8, error, note)
    ratio = ratio_to_best_peer(report, result)
    faster = rounds_faster(report, result)
    noise = "" if faster is None or max(faster, 1 - faster) >= _AGREEMENT else " ~"
    return (
        name,
        role,
        f"{timing.median:.4g}",
        f"{timing.min:.4g}",
        f"{timing.max:.4g}",
        f"{timing.spread:.0%}",
        f"{timing.median / report.floor.ms:.2f}",
        "-" if ratio is None else f"{ratio:.2f}{noise}",
        _bytes_text(result.memory.peak if result.memory else None),
        _bytes_text(result.memory.reserved if result.memory else None),
        error,
        result.memory_reason,
    )


def _bytes_text(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB else f"{nbytes / 2**20:.1f} MiB"


def _first_call(result: Result) -> str:
    return "-" if result.first_call_ms is None else f"{result.first_call_ms:.4g}"


def _ceilings_text(ceilings: Ceilings) -> str:
    parts = [f"{dtype} matmul {v:.4g} TFLOP/s" for dtype, v in ceilings.matmul_tflops.items()]
    parts.append(f"memory copy {ceilings.memory_gbps:.4g} GB/s (read + written)")
    links = (
        ("host to device", ceilings.host_to_device_gbps),
        ("device to host", ceilings.device_to_host_gbps),
        ("each way when both run", ceilings.both_ways_gbps),
    )
    parts += [f"pinned {name} {value:.4g} GB/s" for name, value in links if value is not None]
    return ", ".join(parts)


def _tolerance_text(report: Report) -> str:
    tolerance = report.case.tolerance(report.size)
    return ", ".join(f"{name} {value:g}" for name, value in tolerance.items())


def _markdown_table(rows: Sequence[tuple[str, ...]]) -> str:
    header, *body = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    rule = "|" + "---|" * 2 + "---:|" * 9 + "---|"
    return "\n".join([header, rule, *body])
