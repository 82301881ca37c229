"""How `make tune` finds the kernels' forms, with stand-ins for the kernels and the clock."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.sparse_mla import bench, naive, tune, tuned
from kernels.sparse_mla.bench import OnGpu
from kernels.sparse_mla.inputs import draw_inputs
from kernels.sparse_mla.shape import Shape
from kernels.sparse_mla.tune import DEEPSEEK, GLM, Plan, plans

SMALL = Shape(heads=2, width=8, tail=0, size=4, scale=0.3)


def listed() -> tune.Table:
    return json.loads(tuned.PATH.read_text())["sm_90a"]


class Clock:
    """A bench on which forms take what ``seconds`` says; some do not compile or are wrong."""

    def __init__(self, **special: Any) -> None:
        self.special, self.timed = special, []

    def wrong(self, plan: Plan, shape: Shape, probabilities: bool) -> str | None:
        if self.special.get("fails", lambda plan: False)(plan):
            raise RuntimeError("does not compile\nbecause")
        if probabilities and self.special.get("emits_wrong", lambda plan: False)(plan):
            return "mass is off"
        return "dq is off" if self.special.get("wrong", lambda plan: False)(plan) else None

    def milliseconds(self, plan: Plan, shape: Shape) -> float:
        self.timed.append((plan, shape))
        return self.special["ms"](plan, shape)


def evenly(plan: Plan, shape: Shape) -> float:
    return 5.0 if plan.variant == "split" else 10.0


def test_the_listed_form_is_tried_first_and_every_other_once() -> None:
    for direction, variant, count in (
        ("forward", "split", 4), ("forward", "simple", 2),
        ("backward", "split", 12), ("backward", "simple", 2),
    ):  # fmt: skip
        old = {**listed()[direction][variant], "another": 7}
        made = list(plans(direction, variant, old))
        assert made[0].options == old and all(plan.options["another"] == 7 for plan in made)
        assert len(made) == len({str(plan) for plan in made}) == count
    for consumer, producer in tune.REGISTERS:
        assert 2 * consumer + producer == 504 and consumer % 8 == producer % 8 == 0


def test_what_is_listed_stays_where_nothing_is_faster() -> None:
    lines: list[str] = []
    held = listed()

    def ms(plan: Plan, shape: Shape) -> float:
        """All others are faster, by less than what counts."""
        return evenly(plan, shape) - 0.01 * (plan.options != held[plan.direction][plan.variant])

    clock = Clock(ms=ms)
    assert tune.tune(clock, listed(), lines.append) == listed()
    assert sum(line.endswith("stays") for line in lines) == 6
    shapes = {plan.variant: set() for plan, _ in clock.timed}
    for plan, shape in clock.timed:
        shapes[plan.variant].add(shape)
    assert shapes == {"split": {GLM}, "simple": {GLM, DEEPSEEK}}


def test_the_fastest_form_that_is_right_takes_the_place() -> None:
    """Of the backwards: one fails, one is wrong, one is wrong where it writes probabilities."""

    def consumer(count: int) -> Any:
        return lambda plan: (
            plan.direction == "backward" and plan.options.get("consumer_registers") == count
        )

    def ms(plan: Plan, shape: Shape) -> float:
        return plan.options.get("consumer_registers", 1000) + 0.5 * (
            plan.options.get("scatter") == "pairs"
        )

    clock = Clock(ms=ms, fails=consumer(216), wrong=consumer(224), emits_wrong=consumer(232))
    lines: list[str] = []
    found = tune.tune(clock, listed(), lines.append)
    assert found["forward"]["split"] == {"consumer_registers": 216, "producer_registers": 72}
    assert found["backward"]["split"] == {
        "scatter": "lines", "consumer_registers": 240, "producer_registers": 24,
    }  # fmt: skip
    text = "\n".join(lines)
    assert "consumer_registers=216, producer_registers=72): left out, does not compile" in text
    assert "consumer_registers=224, producer_registers=56): left out, dq is off" in text
    assert "consumer_registers=232, producer_registers=40): left out, mass is off" in text
    old = listed()["backward"]["split"]
    new = found["backward"]["split"]
    assert f"backward split: {json.dumps(old)} -> {json.dumps(new)}" in lines


def test_the_other_variant_is_preferred_where_it_is_faster() -> None:
    clock = Clock(ms=lambda plan, shape: 10 - evenly(plan, shape) / 2)
    found = tune.tune(clock, listed(), lambda line: None)
    assert all(found[d]["preferred"] == {"variant": "simple"} for d in ("forward", "backward"))


def test_without_a_form_that_is_right_there_is_no_table() -> None:
    clock = Clock(ms=evenly, wrong=lambda plan: plan.direction == "backward")
    with pytest.raises(RuntimeError, match="no form of the split backward is right.*stays as it"):
        tune.tune(clock, listed(), lambda line: None)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """And the one that is shipped is written as it lies there."""
    held = json.loads(tuned.PATH.read_text())
    tune.write(held, tmp_path / "tuned.json")
    assert (tmp_path / "tuned.json").read_text() == tuned.PATH.read_text()


def test_a_form_is_tried_for_a_while_only() -> None:
    before = tuned.choice("forward", GLM)
    with pytest.raises(KeyError), tuned.trying("forward", "split", {"consumer_registers": 8}):
        assert tuned.choice("forward", GLM) == ("split", {"consumer_registers": 8})
        raise KeyError
    assert tuned.choice("forward", GLM) == before


def test_tuning_without_a_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main() == 2
    assert "sparse_mla is not tuned here: torch sees no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("size", [1, 4])
def test_inputs_have_complete_pools_in_order(size: int) -> None:
    made = draw_inputs((1, 2, 5, 40), heads=1, width=4, tail=2, size=size, count=40)
    for row, position in zip(made.pools.tolist(), made.position.tolist(), strict=True):
        ids = [i for i in row if i >= 0]
        assert ids == sorted(set(ids)) and row[len(ids) :] == [-1] * (len(row) - len(ids))
        assert len(ids) == (position + 1) // size and (not ids or ids[-1] < (position + 1) // size)
    assert made.start.tolist() == [0] + [1] * 2 + [3] * 5 + [8] * 40
    assert made.q.shape == (48, 1, 6) and made.grad.shape == (48, 1, 4)


def like_kernels(monkeypatch: pytest.MonkeyPatch, spoil: str = "", by: float = 0.0) -> None:
    """The twin in the kernels' places; one of its results is spoilt."""

    def forward(*given: Any, variant: str | None = None, **settings: Any) -> Any:
        out, lse = naive.forward_reference(*given, **settings)
        return out + (by if spoil == "out" else 0), lse

    def backward(*given: Any, variant: str, probabilities: bool, **settings: Any) -> Any:
        *inputs, _, _, grad, dlatent = given
        dq, found, mass = naive.backward_reference(*inputs, grad, **settings)
        dlatent += found
        return dq + (by if spoil == "dq" else 0), mass + (
            by if spoil == "mass" else 0
        ) if probabilities else None

    monkeypatch.setattr(bench, "forward", forward)
    monkeypatch.setattr(bench, "backward", backward)


@pytest.mark.parametrize("by", [1.0, float("nan")])
@pytest.mark.parametrize(
    ("direction", "spoil", "probabilities"),
    [("forward", "out", False), ("backward", "dq", False), ("backward", "mass", True)],
)
def test_a_form_is_held_against_the_twin(
    direction: str, spoil: str, probabilities: bool, by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    like_kernels(monkeypatch)
    plan, held = Plan(direction, "split", {}), OnGpu("cpu", gate=(1, 5, 30))
    assert held.wrong(plan, SMALL, probabilities) is None
    like_kernels(monkeypatch, spoil, by)
    reason = held.wrong(plan, SMALL, probabilities)
    assert reason is not None and reason.startswith(f"{spoil} is off by")
    if spoil == "mass":
        assert held.wrong(plan, SMALL, False) is None
