"""Add one switch after the other, at growing context lengths: peak, step time, and what fits.

    python -m tests.benchmarks.ladder glm_flash_4layer --recipe glm_flash_4layer_8k_1xh200 \
        --lengths 32k 64k 128k --base "nothing=components.layer_recompute.enabled=false" \
        --add "recompute=components.layer_recompute.enabled=true" -- model.n_experts=16

A ``--base`` row stands alone; an ``--add`` row keeps the overrides of the ``--add`` rows before it.
Each cell is one real `make train`. A row that fails at a length is not tried at longer ones. The
table is written after every cell; ``--budget`` ends a run early, ``--more`` goes on with its table,
``--only ROW@LENGTH`` leaves the other cells to other runs, and ``--join`` takes in their tables.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
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


@dataclass(frozen=True)
class Row:
    """A label and the overrides that belong to it."""

    label: str
    overrides: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Run all cells, print and write the table. Returns 1 if no cell trained."""
    options, common = parsed(_parser(), arguments)
    rows = make_rows(options.base or [], options.add or [])
    machine = settled_machine(options.device)
    stem = options.out / f"ladder_{options.name}_{machine.slug}"
    record = {
        **heading("ladder", options, arguments, common, machine),
        "rows": [{"label": row.label, "overrides": list(row.overrides)} for row in rows],
        "cells": {row.label: {} for row in rows},
    }
    cells = record["cells"]
    for file in [stem.with_suffix(".json")] * options.more + (options.join or []):
        commands, found = earlier(file, rows, common, options.recipe)
        record["command"] = "\n".join([commands, record["command"]])
        for label, row in found.items():
            cells[label] |= row
    for _ in climb(rows, options, common, cells):
        publish(stem, record, markdown(record, options.lengths), quiet=True)
    publish(stem, record, markdown(record, options.lengths))
    return int(not any(trained(cell) for row in cells.values() for cell in row.values()))


def make_rows(bases: Sequence[str], additions: Sequence[str]) -> list[Row]:
    """Rows that stand alone, then rows that each keep what the ones before them added.

    Args:
        bases, additions: "LABEL=override override ..."; an addition's label is shown after "+".

    Raises:
        ValueError: a label occurs twice, since the table could not tell the rows apart.
    """
    rows = [
        Row(label, tuple(words.split())) for label, _, words in (b.partition("=") for b in bases)
    ]
    kept: tuple[str, ...] = ()
    for label, _, words in (a.partition("=") for a in additions):
        kept += tuple(words.split())
        rows.append(Row(f"+ {label}", kept))
    labels = [row.label for row in rows]
    if len(set(labels)) < len(labels):
        raise ValueError(f"row labels must differ, got {', '.join(labels)}")
    return rows


def earlier(
    file: Path, rows: Sequence[Row], common: list[str], recipe: str
) -> tuple[str, dict[str, Any]]:
    """The command of another run of the same table, and its cells: label -> length -> figures.

    Raises:
        ValueError: that table is of another recipe, or has other rows or other common overrides.
    """
    record = json.loads(file.read_text())
    wanted = [{"label": row.label, "overrides": list(row.overrides)} for row in rows]
    if record["recipe"] != recipe:
        raise ValueError(f"--more, --join: {file} is of recipe {record['recipe']}, not {recipe}")
    if record["rows"] != wanted or record["common_overrides"] != common:
        raise ValueError(f"--more, --join: {file} was measured with other overrides; leave it out")
    return record["command"], record["cells"]


def climb(
    rows: Sequence[Row], options: argparse.Namespace, common: list[str], cells: dict[str, Any]
) -> Iterator[None]:
    """Train each row at each length until it fails; all rows at a length before the next length.

    Args:
        cells: label -> length -> figures; what is there already is not measured again. Yields after
            each cell that is.
    """
    began = time.monotonic()
    chosen = set(options.only or [])
    legal = [f"{row.label}@{length}" for row, length in product(rows, options.lengths)]
    if unknown := chosen.difference(legal):
        raise ValueError(f"--only: {', '.join(sorted(unknown))}; legal: {', '.join(legal)}")
    for length, row in product(options.lengths, rows):
        mine = cells[row.label]
        if chosen and f"{row.label}@{length}" not in chosen:
            continue
        shorter = options.lengths[: options.lengths.index(length)]
        if length in mine or not all(trained(mine[s]) for s in shorter if s in mine):
            continue
        if options.budget and time.monotonic() - began > options.budget:
            print(f"{row.label} at {length}: not tried, the budget of time is spent", flush=True)
            continue
        overrides = [*common, *row.overrides, f"training.seq_len={length}"]
        print(f"{row.label} at {length} ...", flush=True)
        mine[length] = run_training(
            f"{row.label} {length}", overrides, options.recipe, options.steps, options.ngpu,
            options.limit,
        )  # fmt: skip
        yield


def trained(cell: dict[str, Any]) -> bool:
    """Whether a cell has a step to report besides the first."""
    return not cell["exit"] and bool(cell["step_s"])


def markdown(record: dict[str, Any], lengths: Sequence[str]) -> str:
    """The table: a row per switch, a column per length."""
    facts = ", ".join(f"{key} {value}" for key, value in record["machine"]["facts"].items())
    lines = [
        f"# Memory ladder: {record['recipe']} on {record['machine']['name']}",
        "",
        *(f"- `{command}`" for command in record["command"].splitlines()),
        "",
        f"{record['date']}; {facts}",
        "",
        "Median step seconds after the first step / peak allocated GiB / peak reserved GiB; all "
        "repeats and losses are in the JSON file. An empty cell was not tried: a shorter length "
        "failed, or time was up.",
        "",
        "| " + " | ".join(["", *lengths, "longest that trained"]) + " |",
        "|" + "---|" * (len(lengths) + 2),
    ]
    for row in record["rows"]:
        cells = record["cells"][row["label"]]
        shown = [_cell(cells.get(length)) for length in lengths]
        fits = [length for length in lengths if length in cells and trained(cells[length])]
        lines.append("| " + " | ".join([row["label"], *shown, fits[-1] if fits else "none"]) + " |")
    lines += ["", "Rows add:", ""]
    lines += [
        f"- {row['label']}: `{' '.join(row['overrides']) or '(nothing)'}`" for row in record["rows"]
    ]
    return "\n".join(lines) + "\n"


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if trained(cell):
        step = statistics.median(cell["step_s"])
        return f"{step:.3f} / {cell['peak_active_gib']:.1f} / {cell['peak_reserved_gib']:.1f}"
    if cell["exit"] == 124:
        first = cell.get("first_step_s")
        return "no end within the limit" + (f", first step {first:.1f}" if first else "")
    text = "\n".join(cell["tail"])
    return "out of memory" if "out of memory" in text.lower() else f"exit {cell['exit']}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ladder")
    parser.add_argument("name", help="name of the result files")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--lengths", nargs="+", required=True, help="training.seq_len, growing")
    parser.add_argument("--base", action="append", help="LABEL=override ..., a row of its own")
    parser.add_argument("--add", action="append", help="LABEL=override ..., on top of earlier ones")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run (default: 4)")
    parser.add_argument("--ngpu", type=int, help="ranks (default: the recipe's)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, default=400, help="seconds allowed to a cell")
    parser.add_argument("--budget", type=int, help="seconds after which no cell is begun")
    parser.add_argument("--more", action="store_true", help="keep the cells of an earlier run")
    parser.add_argument("--join", nargs="+", type=Path, help="tables (JSON) of other runs of it")
    parser.add_argument("--only", action="append", help="ROW@LENGTH, may repeat (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
