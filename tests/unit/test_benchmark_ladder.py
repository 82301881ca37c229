"""The memory ladder: which rows it makes, when it stops climbing, what its table says."""

import argparse
from typing import Any

import pytest

from tests.benchmarks import ladder
from tests.benchmarks.ladder import Row, climb, make_rows, markdown


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


def test_a_row_that_fails_is_not_tried_at_longer_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(label: str, overrides: list[str], *_: Any) -> dict[str, Any]:
        seen.append(overrides)
        return _cell(1 if "training.seq_len=64k" in overrides else 0)

    monkeypatch.setattr(ladder, "run_training", run)
    options = argparse.Namespace(
        lengths=["32k", "64k", "128k"], recipe="r", steps=3, ngpu=None, limit=9
    )
    cells = climb(Row("x", ("a=1",)), options, ["common=1"])
    assert list(cells) == ["32k", "64k"]
    assert seen == [
        ["common=1", "a=1", "training.seq_len=32k"],
        ["common=1", "a=1", "training.seq_len=64k"],
    ]


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
