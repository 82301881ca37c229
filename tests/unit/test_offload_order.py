"""Which boundaries go to the host: proofs of the module's docstring, by trying everything."""

import itertools
import random

import pytest

from components.offload.order import choose, forward_order, peak


def subsets(count: int) -> list[tuple[int, ...]]:
    indices = range(count)
    return [s for size in range(count + 1) for s in itertools.combinations(indices, size)]


def walked_peak(
    sizes: list[int], work: list[int], loss: int, chosen: tuple[int, ...], waiting: int, ahead: int
) -> int:
    """The peak by walking through forward and backward, holding a set of boundaries."""
    last = len(sizes) - 1
    on_device = {i for i in range(len(sizes)) if i not in chosen or i > last - waiting}
    highest = loss + sum(sizes[i] for i in on_device)
    on_device = {i for i in on_device if i not in chosen}
    for unit in range(last, -1, -1):
        on_device |= {unit, unit - ahead} - {-1}
        highest = max(highest, work[unit] + sum(sizes[i] for i in on_device))
        on_device.discard(unit)
    return highest


def random_case(seed: int, count: int, equal: bool) -> tuple[list[int], list[int], int]:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 6)] * count if equal else [draw.randint(1, 6) for _ in range(count)]
    return sizes, [draw.randint(0, 20) for _ in range(count)], draw.randint(0, 20)


@pytest.mark.parametrize(("waiting", "ahead"), [(0, 0), (0, 1), (2, 1)])
def test_the_peak_is_that_of_walking_through_backward(waiting: int, ahead: int) -> None:
    for seed in range(20):
        sizes, work, loss = random_case(seed, 5, equal=False)
        for chosen in subsets(5):
            walked = walked_peak(sizes, work, loss, chosen, waiting, ahead)
            assert peak(sizes, work, loss, chosen, waiting, ahead) == walked


def test_of_equal_sizes_the_earliest_have_the_lowest_peak_whatever_the_working_sets() -> None:
    for work in itertools.product((0, 3, 10), repeat=5):
        for loss in (0, 7, 30):
            for count in range(6):
                others = [s for s in subsets(5) if len(s) == count]
                lowest = min(peak([2] * 5, work, loss, s) for s in others)
                assert peak([2] * 5, work, loss, range(count)) == lowest


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("waiting", "ahead"), [(0, 0), (0, 1), (1, 1), (2, 1), (9, 1)])
def test_no_choice_has_a_lower_peak_nor_as_low_a_one_with_fewer_bytes(
    equal: bool, waiting: int, ahead: int
) -> None:
    for seed in range(60):
        sizes, work, loss = random_case(seed, 6, equal)
        budget = random.Random(seed + 999).choice([None, 0, 3, 7, 12, 100])

        def figures(
            chosen: tuple[int, ...],
            case: tuple[list[int], list[int], int] = (sizes, work, loss),
        ) -> tuple[int, int]:
            return peak(*case, chosen, waiting, ahead), sum(case[0][i] for i in chosen)

        fitting = [s for s in subsets(6) if budget is None or sum(sizes[i] for i in s) <= budget]
        found = choose(sizes, work, loss, budget, waiting, ahead)
        assert figures(tuple(found)) == min(figures(s) for s in fitting)


def test_equal_sizes_give_the_earliest_as_many_as_lower_the_peak() -> None:
    # The last unit needs most: what is below it counts there, the two next to it do not.
    assert choose([4] * 6, [0, 0, 0, 0, 0, 50], 0, None) == frozenset(range(4))
    # The loss needs most: every one counts.
    assert choose([4] * 6, [0] * 6, 50, None) == frozenset(range(6))
    # The first unit needs most, with or without the others.
    assert choose([4] * 6, [50, 0, 0, 0, 0, 0], 0, None) == frozenset()
    # Two fit.
    assert choose([4] * 6, [0, 0, 0, 0, 0, 50], 0, 11) == {0, 1}


def test_as_many_units_as_a_large_model_has_are_chosen_at_once() -> None:
    sizes = [4 * 2**30] * 45 + [2**30] * 45
    work = [(7 * i % 13) * 2**30 for i in range(90)]
    found = choose(sizes, work, 0, 100 * 2**30)
    assert sum(sizes[i] for i in found) <= 100 * 2**30
    assert peak(sizes, work, 0, found) <= peak(sizes, work, 0, forward_order(sizes, 100 * 2**30))


def test_forward_order_takes_what_fits_and_goes_on_after_what_does_not() -> None:
    assert forward_order([3, 3, 3], None) == {0, 1, 2}
    assert forward_order([3, 3, 3], 6) == {0, 1}
    assert forward_order([3, 5, 2], 6) == {0, 2}
    assert forward_order([3, 3, 3], 0) == frozenset()


def test_working_sets_of_another_number_of_units_are_refused() -> None:
    with pytest.raises(ValueError, match="3 boundaries, but 2 working sets"):
        choose([1, 1, 1], [0, 0], 0, None)
