"""The memory ladder: which rows it makes, when it stops climbing, what its table says."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import ladder
from tests.benchmarks.ladder import Row, climb, earlier, make_rows, markdown


def test_additions_keep_what_came_before_and_bases_stand_alone() -> None:
    rows = make_rows(["stock=a=1"], ["recompute=b=1", "offload=c=1 d=2"])
    assert rows == [
        Row("stock", ("a=1",)),
        Row("+ recompute", ("b=1",)),
        Row("+ offload", ("b=1", "c=1", "d=2")),
    ]


def test_equal_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="labels must differ, got x, x"):
        make_rows(["x=a=1", "x=b=1"], [])


def _cell(exit_code: int = 0, tail: tuple[str, ...] = ()) -> dict[str, Any]:
    steps = [] if exit_code else [2.0, 3.0, 1.0]
    return {
        "exit": exit_code, "tail": list(tail), "step_s": steps, "peak_active_gib": 4.0,
        "peak_reserved_gib": 5.0,
    }  # fmt: skip


def _options(**changes: Any) -> argparse.Namespace:
    plain = {"lengths": ["32k", "64k", "128k"], "recipe": "r", "steps": 3, "ngpu": None, "limit": 9}
    return argparse.Namespace(**{**plain, "budget": None, "only": None, **changes})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Overrides of the trainings; those at 64k of the row a=1 fail."""
    runs: list[list[str]] = []

    def run(label: str, overrides: list[str], *_: Any) -> dict[str, Any]:
        runs.append(overrides)
        return _cell(1 if {"a=1", "training.seq_len=64k"} <= set(overrides) else 0)

    monkeypatch.setattr(ladder, "run_training", run)
    return runs


def test_a_row_that_fails_is_not_tried_at_longer_lengths(seen: list[list[str]]) -> None:
    cells: dict[str, Any] = {"x": {}, "y": {}}
    rows = [Row("x", ("a=1",)), Row("y", ("b=1",))]
    written = list(climb(rows, _options(), ["common=1"], cells))
    assert {label: list(row) for label, row in cells.items()} == {
        "x": ["32k", "64k"],
        "y": ["32k", "64k", "128k"],
    }
    assert len(written) == 5
    assert seen == [
        ["common=1", "a=1", "training.seq_len=32k"],
        ["common=1", "b=1", "training.seq_len=32k"],
        ["common=1", "a=1", "training.seq_len=64k"],
        ["common=1", "b=1", "training.seq_len=64k"],
        ["common=1", "b=1", "training.seq_len=128k"],
    ]


def test_cells_of_an_earlier_run_are_kept(seen: list[list[str]]) -> None:
    cells: dict[str, Any] = {"y": {"32k": _cell(), "64k": _cell()}}
    list(climb([Row("y", ("b=1",))], _options(), [], cells))
    assert seen == [["b=1", "training.seq_len=128k"]]


def test_a_longer_length_that_failed_elsewhere_stops_no_shorter_one(seen: list[list[str]]) -> None:
    cells: dict[str, Any] = {"y": {"128k": _cell(1), "1m": _cell(1)}}
    list(climb([Row("y", ("b=1",))], _options(), [], cells))
    assert [run[-1] for run in seen] == ["training.seq_len=32k", "training.seq_len=64k"]


def test_no_cell_begins_when_time_is_up(
    seen: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder.time, "monotonic", iter([0.0, 5.0, 15.0, 25.0]).__next__)
    list(climb([Row("y", ("b=1",))], _options(budget=10), [], {"y": {}}))
    assert seen == [["b=1", "training.seq_len=32k"]]


def test_a_table_of_other_overrides_is_not_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({
        "rows": [{"label": "x", "overrides": ["a=1"]}], "common_overrides": [],
        "recipe": "r", "cells": {"x": {"32k": 1}}, "command": "c",
    }))  # fmt: skip
    assert earlier(file, [Row("x", ("a=1",))], [], "r") == ("c", {"x": {"32k": 1}})
    for rows, common in (([Row("x", ("a=2",))], []), ([Row("x", ("a=1",))], ["c=1"])):
        with pytest.raises(ValueError, match="t.json was measured with other overrides"):
            earlier(file, rows, common, "r")
    with pytest.raises(ValueError, match="t.json is of recipe r, not q"):
        earlier(file, [Row("x", ("a=1",))], [], "q")


def test_cells_of_several_runs_make_one_table(
    seen: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Machine:
        name, slug, facts = "m", "m", ()

    monkeypatch.setattr(ladder, "settled_machine", lambda device: Machine)
    table = ["t", "--recipe", "r", "--lengths", "32k", "64k", "--base", "x=c=1", "--base", "y=b=1"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert ladder.main([*table, "--out", str(one), "--only", "x@64k"]) == 0
    assert ladder.main([*table, "--out", str(two), "--only", "y@32k", "--only", "x@32k"]) == 0
    assert [overrides[0] for overrides in seen] == ["c=1", "c=1", "b=1"]
    rest = ["--join", str(one / "ladder_t_m.json"), "--more", "--out", str(two)]
    assert ladder.main([*table, *rest]) == 0
    assert seen[3:] == [["b=1", "training.seq_len=64k"]]
    record = json.loads((two / "ladder_t_m.json").read_text())
    assert {label: set(row) for label, row in record["cells"].items()} == {
        label: {"32k", "64k"} for label in "xy"
    }
    assert record["command"].count("ladder t") == 3
    with pytest.raises(ValueError, match="--only: z@32k; legal: x@32k, x@64k, y@32k, y@64k"):
        ladder.main([*table, "--out", str(one), "--only", "z@32k"])


def test_the_table_shows_medians_reasons_and_the_longest_length() -> None:
    record = {
        "recipe": "r", "command": "c", "date": "d", "machine": {"name": "m", "facts": {}},
        "rows": [{"label": "x", "overrides": ["a=1"]}, {"label": "y", "overrides": []}],
        "cells": {
            "x": {"32k": _cell(), "64k": _cell(1, ("CUDA out of memory",))},
            "y": {"32k": _cell(124)},
        },
    }  # fmt: skip
    text = markdown(record, ["32k", "64k", "128k"])
    assert "| x | 2.000 / 4.0 / 5.0 | out of memory |  | 32k |" in text
    assert "| y | no end within the limit |  |  | none |" in text
    assert "- x: `a=1`" in text and "- y: `(nothing)`" in text
