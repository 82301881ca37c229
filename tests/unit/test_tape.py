"""The tape: what a region keeps, and what it runs again."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from components.recompute.store import Recall
from components.recompute.tape import Tape, choice, output, recomputing, sublayer, unread

CPU = torch.device("cpu")


class Counted:
    """Computes 1, 2, 3, ... and so tells a first run from a second."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> torch.Tensor:
        self.runs += 1
        return torch.tensor(float(self.runs))


class ListStore:
    """Remembers what it was given and how often that was asked back."""

    def __init__(self) -> None:
        self.held: list[float] = []
        self.recalled: list[float] = []

    def boundary(self, tensor: torch.Tensor) -> Recall:
        raise AssertionError("a tape keeps no boundaries")

    def hold(self, tensor: torch.Tensor) -> Recall:
        assert not tensor.requires_grad
        self.held.append(tensor.item())

        def recall() -> torch.Tensor:
            self.recalled.append(tensor.item())
            return tensor

        return recall


def run(mode: AbstractContextManager, region: Callable[[], torch.Tensor]) -> float:
    with mode:
        return region().item()


@pytest.mark.parametrize("mark", [choice, output, sublayer])
def test_outside_a_region_a_mark_only_computes(mark: Callable) -> None:
    compute = Counted()
    assert [mark(compute).item(), mark(compute).item()] == [1.0, 2.0]
    assert not recomputing()


@pytest.mark.parametrize("mark", [choice, output])
@pytest.mark.parametrize("mode", ["replaying", "rebuilding"])
def test_a_whole_value_is_computed_once(mark: Callable, mode: str) -> None:
    tape, compute = Tape(), Counted()
    assert run(tape.recording(), lambda: mark(compute)) == 1.0
    for _ in range(3):
        assert run(getattr(tape, mode)(), lambda: mark(compute)) == 1.0
    assert compute.runs == 1


@pytest.mark.parametrize("keep", [False, True])
def test_a_sublayer_runs_again_for_a_graph_and_if_not_kept(keep: bool) -> None:
    tape, compute = Tape(keep_sublayers=keep), Counted()
    run(tape.recording(), lambda: sublayer(compute))
    assert run(tape.rebuilding(), lambda: sublayer(compute)) == (1.0 if keep else 2.0)
    assert run(tape.replaying(), lambda: sublayer(compute)) == (2.0 if keep else 3.0)


def test_values_come_in_the_order_in_which_they_were_made() -> None:
    tape, values = Tape(), iter(range(10))

    def region() -> torch.Tensor:
        made = [choice(lambda: torch.tensor(next(values))) for _ in range(3)]
        return torch.stack(made)

    with tape.recording():
        first = region()
    with tape.replaying():
        assert torch.equal(region(), first)
    assert first.tolist() == [0, 1, 2]


@pytest.mark.parametrize("keep", [False, True])
def test_marks_within_a_sublayer_are_found_in_every_run(keep: bool) -> None:
    tape = Tape(keep_sublayers=keep)
    chosen, outer, after = Counted(), Counted(), Counted()

    def part() -> torch.Tensor:
        return choice(chosen) * 10 + outer()

    def region() -> torch.Tensor:
        return torch.stack([sublayer(part), sublayer(part), choice(after)])

    with tape.recording():
        assert region().tolist() == [11.0, 22.0, 1.0]
    with tape.rebuilding():
        assert region().tolist() == ([11.0, 22.0, 1.0] if keep else [13.0, 24.0, 1.0])
    before = outer.runs
    with tape.replaying():
        assert region().tolist() == [11.0 + before, 22.0 + before, 1.0]
    assert (chosen.runs, after.runs) == (2, 1)


def test_nothing_within_a_whole_value_is_kept_by_itself() -> None:
    store, inner = ListStore(), Counted()
    tape = Tape(store, keep_sublayers=True)

    def region() -> torch.Tensor:
        return output(lambda: sublayer(lambda: output(inner)) + choice(inner))

    assert run(tape.recording(), region) == 3.0
    assert store.held == [3.0]
    assert run(tape.replaying(), region) == 3.0
    assert inner.runs == 2


def test_a_store_gets_outputs_and_sublayers_but_no_choice() -> None:
    store = ListStore()
    tape = Tape(store, keep_sublayers=True)

    def region() -> torch.Tensor:
        one, two, three = (lambda v=v: torch.tensor(v, requires_grad=True) for v in (1.0, 2.0, 3.0))
        return choice(one) + output(two) + sublayer(three)

    run(tape.recording(), region)
    assert store.held == [2.0, 3.0]
    run(tape.rebuilding(), region)
    assert store.recalled == [2.0, 3.0]


def test_a_choice_has_no_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    assert not choice(lambda: x * 2).requires_grad
    assert sublayer(lambda: x * 2).requires_grad


def test_what_a_run_is_given_may_be_changed_without_harm() -> None:
    tape = Tape()

    def region() -> torch.Tensor:
        value = choice(lambda: torch.ones(2))
        return value.requires_grad_()

    run_in = [tape.recording, tape.replaying, tape.replaying]
    given = []
    for mode in run_in:
        with mode():
            given.append(region())
    given[1].sum().backward()
    assert given[2].grad is None


def test_a_second_recording_starts_afresh() -> None:
    tape, compute = Tape(), Counted()
    run(tape.recording(), lambda: choice(compute))
    assert run(tape.recording(), lambda: choice(compute)) == 2.0
    assert run(tape.replaying(), lambda: choice(compute)) == 2.0


def test_asking_for_more_than_was_kept_says_so() -> None:
    tape = Tape()
    run(tape.recording(), lambda: choice(lambda: torch.zeros(())))
    with (
        pytest.raises(RuntimeError, match=r"more kept values than its first run kept \(1\)"),
        tape.replaying(),
    ):
        choice(lambda: torch.zeros(()))
        choice(lambda: torch.zeros(()))
    assert not recomputing()


def test_an_error_leaves_no_region_behind() -> None:
    def fail() -> torch.Tensor:
        raise KeyError("broken")

    tape, compute = Tape(), Counted()
    for mark in (choice, output, sublayer):
        with pytest.raises(KeyError), tape.recording():
            mark(fail)
    assert [choice(compute).item(), choice(compute).item()] == [1.0, 2.0]


def test_recomputing_is_known_within_second_runs_alone() -> None:
    tape, other = Tape(), Tape()
    seen = []
    for mode in (tape.recording, tape.rebuilding, tape.replaying):
        with mode():
            seen.append(recomputing())
    with tape.replaying(), other.recording():
        seen.append(recomputing())
    assert seen == [False, True, True, False]


def test_results_are_unread_where_a_region_runs_for_its_graph_alone() -> None:
    tape, other, seen = Tape(), Tape(), [unread()]
    for mode in (tape.recording, tape.rebuilding, tape.replaying):
        with mode():
            seen.append(unread())
    with tape.replaying(), other.rebuilding():
        seen.append(unread())
    assert seen == [False, False, False, True, False]


def noisy_region() -> torch.Tensor:
    """Draws within a choice, within a sub-layer and after both."""
    first = choice(lambda: torch.rand(()))
    second = sublayer(lambda: torch.rand(()) + choice(lambda: torch.rand(())))
    return torch.stack([first, second, torch.rand(())])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("mode", ["replaying", "rebuilding"])
def test_random_numbers_after_a_kept_value_are_those_of_the_first_run(
    keep: bool, mode: str
) -> None:
    tape = Tape(keep_sublayers=keep, random_of=CPU)
    torch.manual_seed(3)
    with tape.recording():
        first = noisy_region()
    torch.manual_seed(3)
    with getattr(tape, mode)():
        assert torch.equal(noisy_region(), first)


def test_without_a_device_random_numbers_are_left_alone() -> None:
    tape = Tape()
    torch.manual_seed(3)
    with tape.recording():
        first = noisy_region()
    torch.manual_seed(3)
    with tape.replaying():
        assert not torch.equal(noisy_region(), first)


def test_a_replay_with_one_sublayer_more_than_was_recorded_says_so() -> None:
    tape = Tape(keep_sublayers=True)
    run(tape.recording(), lambda: sublayer(Counted()))
    with pytest.raises(RuntimeError, match="more kept values than its first run kept"):
        run(tape.replaying(), lambda: sublayer(Counted()) + sublayer(Counted()))
