"""Measure whole trainings: `python -m tests.benchmarks.training NAME --recipe X --variant ...`.

Each variant is one real `make train` in processes of its own. Every step's time is kept; the first
is reported apart, because it compiles. The steps after it are the repeats.

    python -m tests.benchmarks.training quickstart_1gpu --recipe quickstart --steps 12 \
        --variant flex=model.attention=flex --variant sdpa=model.attention=sdpa \
        -- validation.enabled=false
"""

import argparse
import contextlib
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import psutil

from components.titan.device import resolve_device
from launch.config.groups import ROOT
from tests.benchmarks.machine import Machine, survey
from tests.benchmarks.probes import make_probe

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str]) -> int:
    """Run all variants, print and write the table. Returns 1 if a variant failed."""
    options, common = parsed(_parser(), arguments)
    machine = settled_machine(options.device)
    variants = []
    for text in options.variant or ["default="]:
        label, _, overrides = text.partition("=")
        own_overrides = [*common, *overrides.split()]
        figures = run_training(
            label, own_overrides, options.recipe, options.steps, options.ngpu, options.limit
        )
        variants.append(figures)
    record = {
        **heading("training", options, arguments, common, machine),
        "ceilings": asdict(machine.ceilings),
        "variants": variants,
    }
    publish(options.out / f"training_{options.name}_{machine.slug}", record, _markdown(record))
    return int(any(variant["exit"] for variant in variants))


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Options before a "--"; after it, overrides of all trainings."""
    own = list(arguments)
    split = own.index("--") if "--" in own else len(own)
    return parser.parse_args(own[:split]), own[split + 1 :]


def settled_machine(device: str) -> Machine:
    """The machine's facts and ceilings, with nothing of their measurement left on the device."""
    probe = make_probe(resolve_device(device))
    machine = survey(probe)
    probe.settle()
    return machine


def heading(
    module: str,
    options: argparse.Namespace,
    arguments: Sequence[str],
    common: list[str],
    machine: Machine,
) -> dict[str, Any]:
    """How a record of whole trainings begins; it is dated now.

    Args:
        module: of this package, whose command line ``arguments`` are.
        common: overrides of all its trainings.
    """
    return {
        "name": options.name,
        "recipe": options.recipe,
        "command": shlex.join(["python", "-m", f"tests.benchmarks.{module}", *arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "common_overrides": common,
        "machine": {"name": machine.name, "facts": dict(machine.facts)},
    }


def publish(stem: Path, record: dict[str, Any], text: str, quiet: bool = False) -> None:
    """Write a record and its table beside each other, and print the table unless ``quiet``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    if not quiet:
        print(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.training")
    parser.add_argument("name", help="name of the result files")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--variant", action="append", help="LABEL=override override ...")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (default: 12)")
    parser.add_argument("--ngpu", type=int, help="ranks (default: the recipe's)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, default=400, help="seconds allowed to a variant")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def run_training(
    label: str, overrides: list[str], recipe: str, steps: int, ngpu: int | None, limit: int
) -> dict[str, Any]:
    """One training in processes of its own; its figures, or why there are none.

    Args:
        label: names it in the result.
        overrides: of the recipe; steps, checkpoints and the output folder are set here.
        recipe: name of the recipe.
        steps: how many to train.
        ngpu: ranks; the recipe's if None.
        limit: seconds after which it is ended, with exit status 124.
    """
    own = [*overrides, f"training.steps={steps}", "checkpoint.enable=false"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launch", "train", "--recipe", recipe]
        command += ["--ngpu", str(ngpu)] if ngpu else []
        command += ["--", *own, f"output_dir={folder}"]
        began = time.monotonic()
        log = Path(folder) / "output"
        with log.open("w") as file:
            code = _status(command, file, limit)
        wall = time.monotonic() - began
        steps = _steps(Path(folder))
        tail = log.read_text().splitlines()[-15:] if code else []
    return {"label": label, "overrides": own, "exit": code, "wall_s": wall, "tail": tail, **steps}


def _status(command: list[str], output: IO[str], limit: int) -> int:
    """Exit status of a command; 124 after ``limit`` seconds, when all its processes are ended."""
    process = psutil.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait(limit)
    except psutil.TimeoutExpired:
        # Ranks run in sessions of their own: one that outlived the launcher would keep its memory.
        everyone = [*process.children(recursive=True), process]
        for each in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(everyone)
        return 124


def _steps(folder: Path) -> dict[str, Any]:
    lines: list[dict[str, float]] = []
    for file in folder.glob("*/*/metrics.jsonl"):
        lines += [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line for line in lines if "train/loss" in line]
    later = lines[1:]
    return {
        "losses": [line["train/loss"] for line in lines],
        "first_step_s": lines[0]["speed/step_seconds"] if lines else None,
        "step_s": [line["speed/step_seconds"] for line in later],
        "tokens_per_second_per_device": [
            line["speed/tokens_per_second_per_device"] for line in later
        ],
        "tflops_per_device": [line["speed/tflops_per_device"] for line in later],
        "peak_active_gib": max((line["memory/peak_active_gib"] for line in lines), default=None),
        "peak_reserved_gib": max(
            (line["memory/peak_reserved_gib"] for line in lines), default=None
        ),
        "alloc_retries": max((line["memory/alloc_retries"] for line in lines), default=None),
    }


def _markdown(record: dict[str, Any]) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in record["machine"]["facts"].items())
    ceiling = record["ceilings"]["matmul_tflops"]
    lines = [
        f"# Training: {record['recipe']} on {record['machine']['name']}",
        "",
        f"`{record['command']}`",
        "",
        f"{record['date']}; {facts}",
        "",
        "Matmul ceiling measured in the same run: "
        + ", ".join(f"{dtype} {value:.3g} TFLOP/s" for dtype, value in ceiling.items())
        + ". Median and range over all steps after the first; TFLOP/s are the model's own, without "
        "recomputation.",
        "",
        "| variant | first step s | step s median (min-max) | tokens/s/device | TFLOP/s/device "
        "| peak active GiB | peak reserved GiB | last loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_row(variant) for variant in record["variants"]]
    return "\n".join(lines) + "\n"


def _row(variant: dict[str, Any]) -> str:
    label, steps = variant["label"], variant["step_s"]
    if variant["exit"] or not steps:
        reason = next((line for line in reversed(variant["tail"]) if "failed" in line), "no steps")
        return f"| {label} | exit {variant['exit']}: {reason} | | | | | | |"
    middle = statistics.median
    return (
        f"| {label} | {variant['first_step_s']:.1f} "
        f"| {middle(steps):.3f} ({min(steps):.3f}-{max(steps):.3f}) "
        f"| {middle(variant['tokens_per_second_per_device']):,.0f} "
        f"| {middle(variant['tflops_per_device']):.1f} "
        f"| {variant['peak_active_gib']:.2f} | {variant['peak_reserved_gib']:.2f} "
        f"| {variant['losses'][-1]:.4f} |"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
