"""Quantities as people write them, and values as messages show them."""

import random

import pytest

from components.core.problems import Problem, RecipeError, did_you_mean, listing, nearest, shown
from components.core.units import BYTES, COUNT, TOKENS, Unit

UNITS = [TOKENS, COUNT, BYTES]


@pytest.mark.parametrize(
    ("unit", "written", "value"),
    [
        (TOKENS, "128k", 131_072),
        (TOKENS, "128K", 131_072),
        (TOKENS, "1M", 1_048_576),
        (TOKENS, "1m", 1_048_576),
        (TOKENS, " 2 k ", 2048),
        (TOKENS, "2.5k", 2560),
        (TOKENS, "131_072", 131_072),
        (TOKENS, 131_072, 131_072),
        (TOKENS, 2048.0, 2048),
        (TOKENS, "0", 0),
        (COUNT, "10k", 10_000),
        (COUNT, "1.1M", 1_100_000),
        (COUNT, "0.3k", 300),
        (COUNT, "3b", 3_000_000_000),
        (COUNT, 1e6, 1_000_000),
        (BYTES, "90GiB", 90 * 2**30),
        (BYTES, "80GB", 80 * 10**9),
        (BYTES, "512 mib", 512 * 2**20),
        (BYTES, "1.5TiB", 3 * 2**39),
        (BYTES, "7b", 7),
        (BYTES, "141gb", 141 * 10**9),
    ],
)
def test_a_quantity_is_read(unit: Unit, written: object, value: int) -> None:
    parsed = unit.parse(written)
    assert parsed == value
    assert type(parsed) is int


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.what)
@pytest.mark.parametrize(
    "written",
    ["", " ", "k", "1kk", "1 000", "-1", "-1k", "1e3", "0x10", "ten", "1k2", "1.k", ".5k", "1,5k",
     "1/2", "٣k", -1, 1.5, float("nan"), float("inf"), float("-inf"), True, False, None, [1], {}],
)  # fmt: skip
def test_what_is_no_quantity_is_refused_with_examples(unit: Unit, written: object) -> None:
    with pytest.raises(ValueError, match="is not") as refusal:
        unit.parse(written)
    assert repr(written) in str(refusal.value)
    assert unit.examples in str(refusal.value)


@pytest.mark.parametrize("written", ["128kb", "128GiB", "1b"])
def test_tokens_take_no_other_suffix(written: str) -> None:
    with pytest.raises(ValueError, match="a number of tokens"):
        TOKENS.parse(written)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.what)
def test_whole_and_fractional_numbers_times_a_suffix_are_exact(unit: Unit) -> None:
    generator = random.Random(0)
    for suffix, factor in (("", 1), *unit.factors):
        for _ in range(50):
            whole, tenths = generator.randrange(10**6), generator.randrange(10)
            assert unit.parse(f"{whole}{suffix}") == whole * factor
            assert unit.parse(f"{whole} {suffix.upper()}") == whole * factor
            exact = (10 * whole + tenths) * factor
            if exact % 10 == 0:
                assert unit.parse(f"{whole}.{tenths}{suffix}") == exact // 10
            else:
                with pytest.raises(ValueError, match="is not"):
                    unit.parse(f"{whole}.{tenths}{suffix}")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.what)
def test_the_examples_are_legal(unit: Unit) -> None:
    for example in unit.examples.replace(" or ", ", ").split(", "):
        assert unit.parse(example.split(" ")[0]) > 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (1e-08, "1e-08"),
        ("a b", "'a b'"),
        ("", "''"),
        ([1, "a", None], "[1, 'a', null]"),
        ((0.9, 0.95), "[0.9, 0.95]"),
        ({"a": {"b": True}}, "{a: {b: true}}"),
        ([], "[]"),
    ],
)
def test_a_value_is_shown_as_a_recipe_writes_it(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_long_value_is_cut() -> None:
    assert shown(list(range(1000)), longest=20) == "[0, 1, 2, 3, 4,  ..."


def test_a_problem_prints_its_key_place_and_hint() -> None:
    problem = Problem("training.steps", "0 is too few", "use 1\nor 2", "mine.yaml:3")
    assert str(problem) == "training.steps: 0 is too few (mine.yaml:3)\n    use 1\n    or 2"
    assert str(Problem("", "no file")) == "no file"


def test_an_error_holds_all_its_problems() -> None:
    error = RecipeError(Problem(name, "is wrong") for name in ("a", "b"))
    assert [problem.path for problem in error.problems] == ["a", "b"]
    assert str(error) == "a: is wrong\nb: is wrong"
    assert isinstance(error, ValueError)


def test_near_names_ignore_case_and_far_names_are_none() -> None:
    assert nearest("Training", ["training", "model"]) == ["training"]
    assert nearest("xyz", ["training", "model"]) == []
    assert did_you_mean("stpes", ["steps", "seq_len"]) == "did you mean steps?"
    assert did_you_mean("xyz", ["steps"]) == ""


def test_a_listing_fits_the_screen_and_breaks_no_name() -> None:
    names = [f"some_long_name_{number}-x" for number in range(40)]
    text = listing("takes", names)
    assert max(map(len, text.splitlines())) <= 92
    assert text.replace("\n  ", " ") == f"takes: {', '.join(names)}"
