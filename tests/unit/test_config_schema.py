"""The schema of a recipe: its keys, their words, their documentation, their defaults."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.core.recipe import Recipe
from components.core.registry import component_types
from launch.config.binder import Binder
from launch.config.explain import chosen_classes, likeness, suggestions
from launch.config.freeze import to_plain
from launch.config.groups import CONF, groups
from launch.config.schema import (
    default_of,
    field_docs,
    hints_of,
    init_fields,
    section_class,
    walk,
)
from launch.config.sources import read
from launch.config.targets import OUR_PACKAGES, TARGET, locate
from launch.config.wording import advice, describe, unit_of


def choices() -> Iterator[dict[str, type]]:
    """Every class that conf/ chooses for each group, one at a time over the first of the others."""
    found: dict[str, list[type]] = {}
    for group, options in groups().items():
        for option in options:
            keys = read(CONF / group / f"{option}.yaml").keys
            if TARGET in keys:
                cls = locate(keys[TARGET][0], group)
                assert isinstance(cls, type), cls
                found.setdefault(group, []).append(cls)
    first = {group: classes[0] for group, classes in found.items()}
    for group, classes in found.items():
        for cls in dict.fromkeys(classes):
            yield first | {group: cls}


def sections(cls: type, chosen: dict[str, type], path: str = "") -> Iterator[tuple[str, type]]:
    yield path, cls
    for name in init_fields(cls):
        key = f"{path}.{name}" if path else name
        section = chosen.get(key) or section_class(cls, name)
        if section is not None:
            yield from sections(section, chosen, key)


ALL_SECTIONS = {(path, cls): None for chosen in choices() for path, cls in sections(Recipe, chosen)}
JARGON = {"typing", "<", "|", "None", "NoneType", "Annotated", "Config", "Any", "Callable"}
CHOSEN = next(chosen for chosen in choices() if chosen["model"].__name__ == "MoEModel")
KEYS = {key.path: key for key in walk(Recipe, classes=CHOSEN)}


def named(section: tuple[str, type]) -> str:
    return f"{section[0] or 'recipe'}-{section[1].__qualname__}"


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=named)
def test_every_default_binds_to_itself(section: tuple[str, type]) -> None:
    path, cls = section
    hints = hints_of(cls)
    for name, field in init_fields(cls).items():
        default = default_of(field)
        if default is dataclasses.MISSING or section_class(cls, name) is not None:
            continue
        binder = Binder()
        bound = binder.bind(hints[name], to_plain(default), f"{path}.{name}")
        assert binder.problems == []
        assert bound == default and type(bound) is type(default)


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=named)
def test_every_key_is_described_in_plain_words(section: tuple[str, type]) -> None:
    for name, tp in hints_of(section[1]).items():
        if name in init_fields(section[1]):
            words = describe(tp)
            assert words
            assert not JARGON & set(words.split()), (name, words)


def declared_by(cls: type, name: str) -> type:
    owners = [base for base in cls.__mro__ if name in getattr(base, "__annotations__", {})]
    return owners[0]


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=named)
def test_every_key_of_ours_is_documented_where_it_is_declared(section: tuple[str, type]) -> None:
    path, cls = section
    docs = field_docs(cls)
    if cls.__module__ == "types" or cls.__name__ == "Components":
        return  # made from the components, each a section with documentation of its own
    for name in init_fields(cls):
        is_section = section_class(cls, name) is not None or f"{path}.{name}".lstrip(".") in CHOSEN
        ours = declared_by(cls, name).__module__.split(".")[0] in (*OUR_PACKAGES, "launch")
        if ours and not is_section:
            assert len(docs.get(name, "")) > 9, f"{cls.__qualname__}.{name} lacks a docstring"


def test_the_schema_holds_every_component_and_torchtitans_sections() -> None:
    for name in component_types():
        assert KEYS[f"components.{name}.enabled"].default is False
    assert KEYS["training.seq_len"].legal.startswith("a number of tokens such as 131072, 128k")
    assert KEYS["training.steps"].legal.startswith("a whole number such as 10000, 10k")
    assert KEYS["training.dtype"].legal == "one of bfloat16, float32"
    assert KEYS["hardware.ranks"].legal == "an integer or auto"
    assert KEYS["optimizer.betas"].legal == "a list of 2, each a number"
    assert KEYS["optimizer.no_decay"].legal == "a list, each item a string"
    assert KEYS["checkpoint.resume"].legal == "a string or null"
    assert KEYS["model.n_layers"].default is dataclasses.MISSING
    assert "peak learning rate" in KEYS["optimizer.lr"].doc.lower()


def test_keys_are_unique_and_none_is_private() -> None:
    paths = [key.path for key in walk(Recipe, classes=CHOSEN)]
    assert len(set(paths)) == len(paths) > 150
    assert not [path for path in paths if "._" in path or path.startswith("_")]


def test_lengths_and_schedules_of_torchtitan_take_units() -> None:
    for path in ("training.seq_len", "training.steps", "lr_scheduler.warmup_steps"):
        section, name = path.split(".")
        assert unit_of(hints_of(section_class(Recipe, section))[name]) is not None  # type: ignore[arg-type]


def test_docs_are_inherited_until_they_are_rewritten(tmp_path: Path) -> None:
    docs = field_docs(section_class(Recipe, "checkpoint"))  # type: ignore[arg-type]
    assert docs["interval"] == "Steps between two checkpoints."
    assert "enable" in docs and "folder" in docs


def test_sections_with_a_class_are_found_at_any_depth() -> None:
    data = {
        "model": {TARGET: "components.models.moe.MoEModel"},
        "a": {"b": {TARGET: "data.corpus.TextCorpus"}},
        "c": {TARGET: "os.system"},
        "d": 3,
    }
    names = {path: cls.__name__ for path, cls in chosen_classes(data).items()}
    assert names == {"model": "MoEModel", "a.b": "TextCorpus"}


@pytest.mark.parametrize(
    ("written", "section", "meant"),
    [
        ("stpes", "training", ["training.steps"]),
        ("Steps", "training", ["training.steps"]),
        ("seqlen", "training", ["training.seq_len"]),
        ("trainning", "", ["training"]),
        ("lr", "", ["optimizer.lr"]),
        ("learning_rate", "", ["optimizer.lr"]),
        ("wd", "optimizer", ["optimizer.weight_decay"]),
        ("ep", "parallelism", ["parallelism.expert_parallel_degree"]),
        ("tp", "", ["parallelism.tensor_parallel_degree"]),
        ("batch_size", "", ["training.local_batch_size", "training.global_batch_size"]),
        ("max_steps", "training", ["training.steps"]),
        ("num_experts", "model", ["model.n_experts"]),
        ("resume", "", ["checkpoint.resume"]),
        ("full_recompute", "", ["components.full_recompute"]),
        ("enable", "validation", ["validation.enabled"]),
        ("warmup", "lr_scheduler", ["lr_scheduler.warmup_steps"]),
        ("xyzzy", "", []),
        ("xyzzy", "training", []),
    ],
)
def test_a_wrong_key_is_met_with_what_was_meant(
    written: str, section: str, meant: list[str]
) -> None:
    prefix = f"{section}." if section else ""
    known = list(dict.fromkeys(p for key in KEYS for p in (key, key.rpartition(".")[0]) if p))
    siblings = {
        path.removeprefix(prefix).split(".")[0] for path in known if path.startswith(prefix)
    }
    assert suggestions(written, section, tuple(sorted(siblings)), known)[: len(meant) or 9] == meant


def test_likeness_is_one_for_equal_names_and_low_for_others() -> None:
    assert likeness("Seq-Len", "seq_len") == 1.0
    assert likeness("steps", "vocab_size") < 0.5
    assert 0.75 <= likeness("max_steps", "steps") < 1.0


@pytest.mark.parametrize(
    ("tp", "value", "hint"),
    [
        (int, "128k", "no unit"),
        (int, "2", "without quotes"),
        (float, "1e-3", "without quotes"),
        (int, 100.0, "write 100"),
        (float, float("inf"), "finite"),
        (str, 3, '"3" in a file'),
        (str, True, "on, off, yes and no"),
        (int, True, ""),
        (bool, "yes", "write true or false"),
        (int | None, "None", "write null"),
        (list[str], "a", "write [a]"),
        (list[int], 3, "write [3]"),
        (list[int], [0.5], ""),
        (tuple[int, int], 3, ""),
        (int, "x", ""),
    ],
    ids=str,
)
def test_advice_is_given_only_where_it_helps(tp: Any, value: Any, hint: str) -> None:
    given = advice(tp, value, "some.key")
    assert hint in given
    assert bool(given) == bool(hint)
