"""Tables of the benchmark of expert dispatch."""

import statistics
from collections.abc import Sequence
from typing import Any

_GIB = 2**30

MODES = 1.1
"""Slowest repeat over the fastest from which a line is marked: its median may be of two modes."""

_TIMES = (
    "| variant | role | forward ms median (min-max) | both ms median (min-max) | x floor "
    "| speed, published: forward, both | speed, llep: forward, both | worst error | note |",
    "|---|---|---:|---:|---:|---:|---:|---:|---|",
)
_MEMORY = (
    "| variant | K | peak GiB forward | both | above resident | reserved "
    "| saved, published: forward, both | saved, llep: forward, both | rows in a chunk "
    "| load before -> after | weights moved GB |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
)


def markdown(record: dict[str, Any]) -> str:
    """The whole record, a section per profile."""
    facts = ", ".join(f"{key} {value}" for key, value in record["machine"]["facts"].items())
    shape = " ".join(f"{key}={value}" for key, value in record["shape"].items())
    lines = [
        f"# Expert dispatch on {record['ranks']} x {record['machine']['name']}",
        "",
        f"{record['size']}: {shape}, all of one rank; bfloat16",
        "",
        f"`{record['command']}`",
        "",
        f"{record['date']}; {facts}",
        "",
        "Times of the slowest rank, peaks of the fullest. Both: forward and backward; forward "
        "alone runs without a graph. Speed and saving are relative to llep_published and to llep; "
        "above 1 is faster. Above resident: without "
        "weights and tokens. `~`: the slowest repeat took over a tenth longer than the fastest.",
    ]
    return "\n".join(lines) + "\n" + "".join(map(of_profile, record["profiles"]))


def of_profile(figures: dict[str, Any]) -> str:
    """The section of one profile."""
    by_name = {figure["name"]: figure for figure in figures["variants"] if figure["both_ms"]}
    base = [by_name.get(name) for name in ("llep_published", "llep")]
    timed = list(by_name.values())
    lines = [
        "",
        f"## {figures['profile']}",
        "",
        f"{figures['scaled']} of {figures['experts']} experts. Floor: "
        f"{figures['floor']['arithmetic']}.",
        "",
        *_TIMES,
        *(_time_line(figure, figures["floor"], base) for figure in figures["variants"]),
        "",
        *_MEMORY,
        *(_memory_line(figure, base) for figure in timed),
        "",
        "All repeats, ms:",
        "",
        *(_repeats(figure) for figure in timed),
    ]
    return "\n".join(lines) + "\n"


def _time_line(
    figure: dict[str, Any], floor: dict[str, Any], base: Sequence[dict[str, Any] | None]
) -> str:
    start = f"| {figure['name']} | {figure['role']}"
    if not figure["both_ms"]:
        return f"{start} | | | | | | | {figure['reason'] or 'not timed'} |"
    speeds = [
        ", ".join(f"{_median(b, kind) / _median(figure, kind):.2f}" for kind in ("forward", "both"))
        if b
        else ""
        for b in base
    ]
    ratio = _median(figure, "both") / floor["both_ms"]
    return (
        f"{start} | {_range(figure['forward_ms'])} | {_range(figure['both_ms'])} | {ratio:.2f} "
        f"| {' | '.join(speeds)} | {max(figure['errors'].values()):.1e} | |"
    )


def _memory_line(figure: dict[str, Any], base: Sequence[dict[str, Any] | None]) -> str:
    moved, peak = figure["traffic"], figure["both_peak_bytes"]
    saved = [
        ", ".join(
            f"{100 * (1 - figure[f'{kind}_peak_bytes'] / b[f'{kind}_peak_bytes']):.1f}%"
            for kind in ("forward", "both")
        )
        if b
        else ""
        for b in base
    ]
    return (
        f"| {figure['name']} | {moved['chunks']} | {figure['forward_peak_bytes'] / _GIB:.3f} "
        f"| {peak / _GIB:.3f} | {figure['both_above_bytes'] / _GIB:.3f} "
        f"| {figure['both_reserved_bytes'] / _GIB:.3f} | {' | '.join(saved)} "
        f"| {figure.get('realised_receive_peak', moved['receive_peak'])} "
        f"| {moved['before']:.2f} -> {moved['after']:.2f} "
        f"| {figure['migrated_bytes'] / 1e9:.2f} |"
    )


def _repeats(figure: dict[str, Any]) -> str:
    parts = (
        f"{kind} {' '.join(f'{ms:.4g}' for ms in figure[f'{kind}_ms'])}"
        for kind in ("forward", "both")
    )
    return f"- {figure['name']}: {'; '.join(parts)}"


def _median(figure: dict[str, Any], kind: str) -> float:
    return statistics.median(figure[f"{kind}_ms"])


def _range(times_ms: list[float]) -> str:
    mark = "~" if max(times_ms) > MODES * min(times_ms) else ""
    return f"{mark}{statistics.median(times_ms):.4g} ({min(times_ms):.4g}-{max(times_ms):.4g})"
