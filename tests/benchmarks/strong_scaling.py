"""The same training on one GPU and on several, at the same tokens per step: tokens per second.

    python -m tests.benchmarks.strong_scaling glm_flash_4layer_128k --recipe glm_flash_4layer_8k_1xh200 \
        --one "components.sublayer_chunking.enabled=true" \
        --several "hidden=parallelism.context_parallel_degree=2 components.context_parallel.enabled=true" \
        -- training.seq_len=128k

Each is one real `make train`, one after the other; the table is written after each. Only trainings
that take in as many tokens per step as the one on one GPU are compared with it.
"""  # noqa: E501

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.training import (
    RESULTS,
    heading,
    parsed,
    publish,
    run_training,
    settled_machine,
)

ONE = "one"

SAME = 0.02
"""Share by which tokens per step may differ: they are measured, as rate times seconds."""


def main(arguments: Sequence[str]) -> int:
    """Run all trainings, print and write the table. Returns 1 if one of them failed."""
    options, common = parsed(_parser(), arguments)
    cases = [(ONE, 1, options.one.split())]
    for text in options.several:
        label, _, words = text.partition("=")
        cases.append((label, options.ranks, words.split()))
    labels = [label for label, _, _ in cases]
    if len(set(labels)) < len(labels):
        raise ValueError(f"--several: labels {', '.join(labels)}; legal: all different")
    machine = settled_machine(options.device)
    record: dict[str, Any] = {
        **heading("strong_scaling", options, arguments, common, machine),
        "ranks": options.ranks,
        "ceilings": asdict(machine.ceilings),
        "runs": [],
    }
    stem = options.out / f"strong_scaling_{options.name}_{options.ranks}x{machine.slug}"
    began = time.monotonic()
    for label, ranks, words in cases:
        print(f"[{time.monotonic() - began:5.1f} s] {label} on {ranks} ...", flush=True)
        figures = run_training(
            label, [*common, *words], options.recipe, options.steps, ranks, options.limit
        )
        record["runs"].append({**figures, "ranks": ranks})
        publish(stem, record, markdown(record), quiet=True)
        print(
            "\n".join([*figures["tail"], _line(record["runs"][-1], record["runs"][0])]), flush=True
        )
    print(markdown(record))
    return int(not all(map(trained, record["runs"])))


def trained(run: dict[str, Any]) -> bool:
    """Whether a training has a step to report besides the first."""
    return not run["exit"] and bool(run["step_s"])


def rate(run: dict[str, Any]) -> float:
    """Tokens per second of all ranks, the median over steps."""
    return statistics.median(run["tokens_per_second_per_device"]) * run["ranks"]


def step_tokens(run: dict[str, Any]) -> float:
    """Tokens that all ranks take in per step, by rate and seconds of a line alike."""
    pairs = zip(run["tokens_per_second_per_device"], run["step_s"], strict=True)
    return statistics.median(r * seconds for r, seconds in pairs) * run["ranks"]


def speed_up(run: dict[str, Any], one: dict[str, Any]) -> float | None:
    """Rate over that on one GPU; None where either is missing or takes in other tokens."""
    if not (trained(run) and trained(one)):
        return None
    if abs(step_tokens(run) / step_tokens(one) - 1) > SAME:
        return None
    return rate(run) / rate(one)


def markdown(record: dict[str, Any]) -> str:
    """The table, one line per training."""
    facts = ", ".join(f"{key} {value}" for key, value in record["machine"]["facts"].items())
    lines = [
        f"# Strong scaling: {record['recipe']} on 1 and {record['ranks']} x "
        f"{record['machine']['name']}",
        "",
        f"`{record['command']}`",
        "",
        f"{record['date']}; {facts}",
        "",
        "Whole steps, the first left out. Speed-up: tokens per second of all ranks over those of "
        f"`{ONE}`, at as many tokens per step. Ranks draw the parts of the initial weights that "
        "they hold, so a loss belongs to the number of ranks that it began with.",
        "",
        "| run | ranks | tokens per step | tokens/s median | step s median (min-max) | speed-up "
        "| peak active GiB | peak reserved GiB | first step s | last loss | note |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
        *(_line(run, record["runs"][0]) for run in record["runs"]),
        "",
        f"All: `{' '.join(record['common_overrides'])}`; and, beside steps and checkpoints:",
        "",
        *(f"- {run['label']}: `{' '.join(_own(run, record))}`" for run in record["runs"]),
        "",
        "Seconds of every step after the first:",
        "",
        *(f"- {run['label']}: {_seconds(run)}" for run in record["runs"]),
    ]
    return "\n".join(lines) + "\n"


def _own(run: dict[str, Any], record: dict[str, Any]) -> list[str]:
    return [o for o in run["overrides"] if o not in record["common_overrides"]]


def _seconds(run: dict[str, Any]) -> str:
    return " ".join(f"{seconds:.3f}" for seconds in run["step_s"]) or "none"


def _line(run: dict[str, Any], one: dict[str, Any]) -> str:
    start = f"| {run['label']} | {run['ranks']}"
    if not trained(run):
        reason = "no end within the limit" if run["exit"] == 124 else f"exit {run['exit']}"
        if "out of memory" in "\n".join(run["tail"]).lower():
            reason = "out of memory"
        return f"{start} | | | | | | | | | {reason} |"
    steps, ratio = run["step_s"], speed_up(run, one)
    note = "" if ratio is not None else "not comparable: other tokens per step, or no `one`"
    return (
        f"{start} | {step_tokens(run):,.0f} | {rate(run):,.0f} "
        f"| {statistics.median(steps):.3f} ({min(steps):.3f}-{max(steps):.3f}) "
        f"| {'' if ratio is None else f'{ratio:.3f}'} | {_number(run['peak_active_gib'])} "
        f"| {_number(run['peak_reserved_gib'])} | {run['first_step_s']:.1f} "
        f"| {run['losses'][-1]:.4f} | {note} |"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.strong_scaling")
    parser.add_argument("name", help="name of the result files")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--one", default="", help="overrides on one GPU, besides the common ones")
    parser.add_argument(
        "--several", action="append", required=True, help="LABEL=override override ..., may repeat"
    )
    parser.add_argument("--ranks", type=int, default=2, help="of --several (default: 2)")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run (default: 4)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, default=240, help="seconds allowed to a run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
