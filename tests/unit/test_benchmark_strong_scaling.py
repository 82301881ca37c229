"""Strong scaling: what is compared, what is not, and what the table says."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import strong_scaling
from tests.benchmarks.fakes import machine
from tests.benchmarks.strong_scaling import main, speed_up, step_tokens


def run_of(rank_rate: float, seconds: float, ranks: int, exit_code: int = 0) -> dict[str, Any]:
    steps = [] if exit_code else [seconds, 2 * seconds, seconds]
    return {
        "label": "x", "overrides": [], "exit": exit_code, "tail": ["CUDA out of memory"],
        "step_s": steps, "tokens_per_second_per_device": [rank_rate * seconds / s for s in steps],
        "first_step_s": 9.0, "losses": [3.0], "peak_active_gib": 1.0, "peak_reserved_gib": None,
        "ranks": ranks,
    }  # fmt: skip


def test_speed_up_is_of_all_ranks_tokens_per_second() -> None:
    one, two = run_of(100, 2.0, 1), run_of(95, 200 / 190, 2)
    assert step_tokens(one) == step_tokens(two) == pytest.approx(200)
    assert speed_up(two, one) == pytest.approx(1.9) and speed_up(one, one) == 1


def test_other_tokens_per_step_or_no_result_are_not_compared() -> None:
    one = run_of(100, 2.0, 1)
    assert speed_up(run_of(100, 2.0, 2), one) is None
    assert speed_up(run_of(0, 0, 2, exit_code=1), one) is None
    assert speed_up(one, run_of(0, 0, 1, exit_code=1)) is None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of the trainings; the one called "big" runs out of memory."""
    found: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> dict[str, Any]:
        found.append(arguments)
        label, overrides, ranks = arguments[0], arguments[1], arguments[4]
        figures = run_of(100 if ranks == 1 else 90, 2.0 / ranks / (0.9 if ranks > 1 else 1), ranks)
        figures |= run_of(0, 0, ranks, exit_code=1) if label == "big" else {}
        return figures | {"label": label, "overrides": overrides}

    monkeypatch.setattr(strong_scaling, "run_training", run)
    monkeypatch.setattr(strong_scaling, "settled_machine", lambda device: machine())
    return found


def test_every_training_gets_its_overrides_and_a_line(
    calls: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    several = ["--several", "cp=a=2 b=3", "--several", "big=c=4"]
    own = ["n", "--recipe", "r", "--one", "a=1", *several, "--out", str(tmp_path), "--", "d=5"]
    assert main(own) == 1  # one of them failed
    assert [(c[0], c[1], c[4]) for c in calls] == [
        ("one", ["d=5", "a=1"], 1), ("cp", ["d=5", "a=2", "b=3"], 2), ("big", ["d=5", "c=4"], 2),
    ]  # fmt: skip
    (table,), (record,) = tmp_path.glob("*.md"), tmp_path.glob("*.json")
    text = table.read_text()
    assert "| one | 1 | 200 | 100 |" in text and "| cp | 2 | 200 | 180 |" in text
    assert " 1.800 |" in text and "| big | 2 | | | | | | | | | out of memory |" in text
    assert "- cp: `a=2 b=3`" in text and len(json.loads(record.read_text())["runs"]) == 3


def test_labels_differ(calls: list[tuple[Any, ...]]) -> None:
    with pytest.raises(ValueError, match="labels one, x, x; legal: all different"):
        main(["n", "--recipe", "r", "--several", "x=", "--several", "x=a=1"])
    assert not calls
