"""The binder, form by form, on small settings classes."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import pytest

from components.core.units import Bytes, Count, Tokens
from launch.config import targets
from launch.config.binder import BAD, Binder, Refused, UnknownKey

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Inner:
    size: int = 1
    rate: float = 0.5


@dataclass(kw_only=True, slots=True)
class Wider(Inner):
    extra: str = "x"


@dataclass(kw_only=True, slots=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    wider: Inner = field(default_factory=Wider)
    open: Any = field(default_factory=Inner)
    maybe: Inner | None = None
    length: Tokens = 8
    items: list[Inner] = field(default_factory=list)
    _hidden: int = 0
    derived: int = field(default=0, init=False)


@dataclass(kw_only=True, slots=True)
class Needy:
    name: str
    count: int


@dataclass(kw_only=True, slots=True)
class Strict:
    low: int = 0
    high: int = 1

    def __post_init__(self) -> None:
        if self.low < 0:
            raise ValueError(f"low is {self.low}; it must be zero or more")
        if self.low > self.high:
            raise ValueError("low must not be above high; see --strict.low and --strict.high")
        if self.high > 100:
            raise ValueError("too much")


@pytest.mark.parametrize(
    ("tp", "value", "bound"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, 0.5, 0.5),
        (str, "a", "a"),
        (bool, True, True),
        (Any, {"a": [1]}, {"a": [1]}),
        (T, 3, 3),
        (int | None, None, None),
        (int | None, 3, 3),
        (int | str, "a", "a"),
        (float | int, 3, 3.0),
        (int | Literal["auto"], "auto", "auto"),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, "1"], "1", "1"),
        (Literal[True], True, True),
        (list, [1, "a"], [1, "a"]),
        (list[int], [], []),
        (list[list[str]], [["a"], []], [["a"], []]),
        (list[int] | None, [1], [1]),
        (tuple[float, float], [0.9, 1], (0.9, 1.0)),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (tuple, [1], (1,)),
        (dict, {"a": 1}, {"a": 1}),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (dict[str, Inner], {"a": {"size": 2}}, {"a": Inner(size=2)}),
        (Inner, {"size": 2}, Inner(size=2)),
        (Inner | None, {"size": 2}, Inner(size=2)),
        (list[Inner], [{"size": 2}, {}], [Inner(size=2), Inner()]),
        (Tokens, "2k", 2048),
        (Tokens | None, None, None),
        (Count | Literal["all"], "2k", 2000),
        (list[Bytes], ["1KiB", 3], [1024, 3]),
        (Annotated[int, "a note"], 3, 3),
        (Annotated[int | None, "a note"], None, None),
    ],
    ids=str,
)
def test_a_value_of_the_type_is_bound(tp: Any, value: Any, bound: Any) -> None:
    binder = Binder()
    result = binder.bind(tp, value, "key")
    assert binder.problems == []
    assert result == bound
    assert type(result) is type(bound)


@pytest.mark.parametrize(
    ("tp", "value", "message"),
    [
        (int, True, "expected an integer, got true"),
        (int, 1.0, "expected an integer, got 1.0"),
        (int, "1", "expected an integer, got '1'"),
        (int, None, "expected an integer, got null"),
        (float, False, "expected a number, got false"),
        (float, float("nan"), "expected a number, got nan"),
        (float | int, float("inf"), "expected a number, got inf"),
        (str, 1, "expected a string, got 1"),
        (bool, 1, "expected true or false, got 1"),
        (bool, "on", "expected true or false, got 'on'"),
        (int | None, "x", "expected an integer or null, got 'x'"),
        (Literal["a", "b"], "c", "expected one of a, b, got 'c'"),
        (Literal[1, 2], True, "expected one of 1, 2, got true"),
        (Literal[1, 2], 1.0, "expected one of 1, 2, got 1.0"),
        (list[int], "a", "expected a list, each item an integer, got 'a'"),
        (list[int], {}, "expected a list, each item an integer, got {}"),
        (tuple[float, float], [1], "expected a list of 2, each a number, got [1]"),
        (dict[str, int], [1], "expected a mapping, got [1]"),
        (Inner, 3, "expected a section of keys, got 3"),
        (Inner | None, 3, "expected a section of keys or null, got 3"),
        (Tokens, "2x", "expected a number of tokens such as 131072"),
        (Tokens | None, "2x", "or null, got '2x'"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_named_with_what_is_legal(
    tp: Any, value: Any, message: str
) -> None:
    binder = Binder()
    assert binder.bind(tp, value, "some.key") is BAD
    (problem,) = binder.problems
    assert problem.path == "some.key"
    assert message in problem.message


@pytest.mark.parametrize(
    ("tp", "value", "path"),
    [
        (list[int], [1, "a"], "key[1]"),
        (list[list[int]], [[], [1, None]], "key[1][1]"),
        (tuple[int, str], [1, 2], "key[1]"),
        (dict[str, int], {"a": "b"}, "key.a"),
        (dict[str, int], {3: 4}, "key.3"),
        (Inner, {"size": "a"}, "key.size"),
        (Inner | None, {"size": "a"}, "key.size"),
        (list[Inner], [{}, {"size": "a"}], "key[1].size"),
        (dict[str, Inner], {"a": {"rate": "b"}}, "key.a.rate"),
    ],
    ids=str,
)
def test_the_problem_points_inside(tp: Any, value: Any, path: str) -> None:
    binder = Binder()
    assert binder.bind(tp, value, "key") is BAD
    assert [problem.path for problem in binder.problems] == [path]


def test_a_section_takes_the_class_of_its_default() -> None:
    bound = Binder().construct(Outer, {"wider": {"extra": "y"}, "open": {"size": 3}})
    assert bound.wider == Wider(extra="y")
    assert bound.open == Inner(size=3)


@pytest.mark.parametrize("value", [None, 3, "a", []])
def test_an_open_section_is_as_strict_as_its_default(value: object) -> None:
    binder = Binder()
    assert binder.construct(Outer, {"open": value}) is BAD
    assert "expected a section of keys" in binder.problems[0].message


def test_an_optional_section_may_be_null_or_a_section() -> None:
    assert Binder().construct(Outer, {"maybe": None}).maybe is None
    assert Binder().construct(Outer, {"maybe": {"size": 2}}).maybe == Inner(size=2)


def test_private_and_derived_fields_are_no_keys() -> None:
    binder = Binder()
    assert binder.construct(Outer, {"_hidden": 1, "derived": 1}) is BAD
    assert [problem.path for problem in binder.problems] == ["_hidden", "derived"]


def test_all_problems_are_found_at_once_in_the_order_of_the_data() -> None:
    binder = Binder()
    data = {"inner": {"size": "a", "ratio": 1}, "length": "x", "items": [{"size": 0.5}], "more": 1}
    assert binder.construct(Outer, data, "top") is BAD
    paths = ["top.inner.size", "top.inner.ratio", "top.length", "top.items[0].size", "top.more"]
    assert [problem.path for problem in binder.problems] == paths


def test_an_unknown_key_knows_its_section_and_siblings() -> None:
    binder = Binder()
    binder.construct(Outer, {"inner": {"seize": 1, 4: 2}})
    first, second = binder.problems
    assert isinstance(first, UnknownKey) and isinstance(second, UnknownKey)
    assert (first.section, first.name, first.siblings) == ("inner", "seize", ("size", "rate"))
    assert (second.path, second.name) == ("inner.4", "4")


def test_missing_keys_are_named_with_their_types() -> None:
    binder = Binder()
    assert binder.construct(Needy, {}, "x") is BAD
    found = [(problem.path, problem.message) for problem in binder.problems]
    assert found == [
        ("x.name", "must be set: a string"),
        ("x.count", "must be set: an integer"),
    ]


def test_a_refusal_in_the_words_of_a_field_is_that_fields_problem() -> None:
    binder = Binder()
    assert binder.construct(Strict, {"low": -1, "high": 2}, "x") is BAD
    (problem,) = binder.problems
    assert (problem.path, problem.message) == ("x.low", "-1; it must be zero or more")


def test_a_refusal_of_several_fields_shows_their_values() -> None:
    binder = Binder()
    assert binder.construct(Strict, {"low": 3, "high": 2}, "x") is BAD
    (problem,) = binder.problems
    assert isinstance(problem, Refused)
    assert problem.path == "x"
    assert problem.message == "low must not be above high; see strict.low and strict.high"
    assert problem.hint == "given: low: 3, high: 2"
    assert problem.about == ("x.low", "x.high")


def test_a_refusal_that_names_no_field_shows_what_was_given() -> None:
    binder = Binder()
    assert binder.construct(Strict, {"high": 101}, "x") is BAD
    (problem,) = binder.problems
    assert (problem.path, problem.message, problem.hint) == ("x", "too much", "given: high: 101")


HERE = "tests.unit.test_config_binder"
VALIDATION = {"_target_": "components.core.recipe.Validation"}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("os.system", "'os.system' may not be named here"),
        (f"{HERE}.Inner", "may not be named here"),
        ("launch.settings.LaunchSettings", "may not be named here"),
        ("builtins.eval", "may not be named here"),
        ("componentsx.core", "may not be named here"),
        (3, "3 may not be named here"),
        (None, "null may not be named here"),
        ("", "'' may not be named here"),
        ("components", "is not a settings class"),
        ("components.core.recipe", "is not a settings class"),
        ("components.core.problems.nearest", "is not a settings class"),
        ("components.core.problems.RecipeError", "is not a settings class"),
        ("components.core.problems.dataclass", "is not a settings class"),
        ("components.core.recipe.Path.home", "components.core.recipe has no 'Path'"),
        ("torchtitan.trainer.os.system", "may not be named here"),
        ("torchtitan.components.loss.torch.compile", "is not a settings class"),
        ("torchtitan", "may not be named here"),
        ("torchtitan.tools.profiler.Profiler.Config", "may not be named here"),
        ("torchtitan.experiments.rl.Anything", "may not be named here"),
        ("torchtitan.models.flux.FluxModel", "may not be named here"),
        ("torchtitan.modelsx.Anything", "may not be named here"),
        ("components.titan.checkpoint.TensorStorageMetadata", "is not a settings class"),
        ("torchtitan.models.common.moe.torch.nn.Linear", "is not a settings class"),
        ("components.core.recipe.Hardwear", "components.core.recipe has no 'Hardwear'"),
        ("components.core.nope.X", "components.core has no 'nope'"),
        ("components..core", "components has no ''"),
        ("components.models.settings.ModelSettings", "is the base of several classes"),
    ],
)
def test_a_target_is_a_settings_class_of_our_packages_or_torchtitan(
    target: object, message: str
) -> None:
    binder = Binder()
    assert binder.bind(Inner, {"_target_": target}, "x") is BAD
    (problem,) = binder.problems
    assert problem.path == "x._target_"
    assert message in problem.message


def test_a_target_is_built_where_its_type_is_legal() -> None:
    data = {"_target_": "components.core.recipe.Validation", "every": "1k"}
    from components.core.recipe import Hardware, Validation

    assert Binder().bind(Validation, data, "x") == Validation(every=1000)
    assert Binder().bind(Hardware | Validation, data, "x") == Validation(every=1000)
    for tp in (Hardware, int, str, list, dict[str, str], Literal["a"], Tokens, int | None):
        binder = Binder()
        assert binder.bind(tp, data, "x") is BAD
        assert "does not belong here" in binder.problems[0].message


def test_torchtitans_nested_config_classes_can_be_named() -> None:
    from torchtitan.components.loss import CrossEntropyLoss

    data = {"_target_": "torchtitan.components.loss.CrossEntropyLoss.Config"}
    assert Binder().bind(CrossEntropyLoss.Config, data, "x") == CrossEntropyLoss.Config()


def test_a_name_is_judged_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(targets.importlib, "import_module", imported.append)
    for name in ("torchtitan.experiments.rl.X", "torchtitan.models.flux.X", "os.system"):
        assert Binder().bind(Inner, {"_target_": name}, "x") is BAD
    # Where no class can stand, none is looked for.
    for tp in (Any, int, dict[str, Any]):
        assert Binder().bind(tp, {"_target_": "components.core.nope.X"}, "x") is BAD
    assert imported == []


@pytest.mark.parametrize(
    ("tp", "value", "path"),
    [
        (Any, VALIDATION, "x._target_"),
        (T, VALIDATION, "x._target_"),
        (list, [VALIDATION], "x[0]._target_"),
        (dict[str, Any], {"a": VALIDATION}, "x.a._target_"),
    ],
    ids=str,
)
def test_a_key_that_takes_anything_takes_no_class(tp: Any, value: Any, path: str) -> None:
    binder = Binder()
    assert binder.bind(tp, value, "x") is BAD
    (problem,) = binder.problems
    assert problem.path == path
    assert problem.message == f"{VALIDATION['_target_']!r} does not belong here; " + (
        "this key takes plain values"
    )
