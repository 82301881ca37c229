"""Tables of the benchmark of context parallelism."""

import statistics
from typing import Any

_GIB, _MIB = 2**30, 2**20

LEAST_RATIO = 2.4
"""Bytes forward that exchanging projections sends for each that exchanging hidden states does, at
least, at the published widths on two ranks."""

_HEADER = (
    "| variant | ms median (min-max) | speed-up | x floor | peak GiB | reserved "
    "| sent forward MiB: counted, formula | backward: counted, formula | worst error | note |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
)


def projections_over_hidden(figures: dict[str, Any]) -> dict[str, float]:
    """Direction -> counted bytes of one over those of the other; empty where one was not run."""
    sent = {v["name"]: v["sent"] for v in figures["variants"] if v.get("sent")}
    if not {"projections", "hidden"} <= sent.keys():
        return {}
    return {way: sent["projections"][way] / sent["hidden"][way] for way in ("forward", "backward")}


def markdown(record: dict[str, Any]) -> str:
    """The whole record, a section per mixer."""
    facts = ", ".join(f"{key} {value}" for key, value in record["machine"]["facts"].items())
    shape = record["shape"]
    lines = [
        f"# Context parallelism on {record['ranks']} x {record['machine']['name']}",
        "",
        f"One layer's mixer, forward and backward, {shape['tokens']:,} tokens in one document, "
        f"{shape['dtype']}, {record['layout']} layout",
        "",
        f"`{record['command']}`",
        "",
        f"{record['date']}; {facts}",
        "",
        "Times of the slowest rank, a barrier before each call; peaks of the fullest rank, weights "
        "and tokens included; reserved with the tokens of both forms. `whole`: all tokens on one "
        "rank; all ranks run it at once, each by itself. Speed-up: over `whole`, at the same "
        "tokens in all. Sent: by one rank for one "
        "layer and pass, the most of any, counted in the run.",
        "",
        f"Gate: relative error of the output and every gradient against `whole`, on documents of "
        f"{', '.join(map(str, shape['gate']))} tokens, at most {shape['tolerance']:g}; counted "
        "bytes equal the formulas.",
    ]
    return "\n".join(lines) + "\n" + "".join(map(of_mixer, record["mixers"]))


def of_mixer(figures: dict[str, Any]) -> str:
    """The section of one mixer."""
    base = next((v for v in figures["variants"] if v["name"] == "whole" and v["times_ms"]), None)
    lines = [
        "",
        f"## {figures['mixer']}",
        "",
        f"{'; '.join(figures['notes'])}. Floor: {figures['floor']['arithmetic']}.",
        "",
        *_HEADER,
        *(_line(v, base, figures["floor"]) for v in figures["variants"]),
    ]
    ratio = projections_over_hidden(figures)
    if ratio:
        ways = " and ".join(f"{value:.3f} {way}" for way, value in ratio.items())
        lines += ["", f"Bytes of `projections` over those of `hidden`, counted: {ways}."]
    if "other_pools" in figures:
        text = f"Pools that ranks choose otherwise at the gate: {figures['other_pools']:.2e}."
        lines += ["", text]
    lines += ["", "All repeats, ms:", ""]
    lines += [
        f"- {v['name']}: {' '.join(f'{ms:.4g}' for ms in v['times_ms'])}"
        for v in figures["variants"]
        if v["times_ms"]
    ]
    return "\n".join(lines) + "\n"


def _line(v: dict[str, Any], base: dict[str, Any] | None, floor: dict[str, Any]) -> str:
    if not v["times_ms"]:
        return f"| {v['name']} | | | | | | | | | {v['reason'] or 'not timed'} |"
    times, middle = v["times_ms"], statistics.median(v["times_ms"])
    speed = f"{statistics.median(base['times_ms']) / middle:.2f}" if base else ""
    ways = [f"{v['sent'][w] / _MIB:.2f}, {v['formula'][w] / _MIB:.2f}" for w in v["formula"]]
    halo = f"and {v['halo_bytes']:,} bytes before parts" if v["halo_bytes"] else ""
    return (
        f"| {v['name']} | {middle:.4g} ({min(times):.4g}-{max(times):.4g}) | {speed} "
        f"| {middle / floor['whole_ms' if v['name'] == 'whole' else 'split_ms']:.2f} "
        f"| {v['peak_bytes'] / _GIB:.3f} | {v['reserved_bytes'] / _GIB:.3f} "
        f"| {' | '.join(ways)} | {max(v['errors'].values()):.1e} | {halo} |"
    )
