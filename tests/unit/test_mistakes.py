"""What people get wrong in a recipe or on the command line, and the answer to it.

The corpus is in ``mistakes/*.txt``; ``config_support.corpus`` says how to read it.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from components.core.problems import RecipeError
from launch.cli import main
from launch.config import compose, explain, groups, origins
from launch.config.groups import CONF
from launch.ready import Ready
from tests.unit.config_support import (
    CORPUS,
    DEFAULTS,
    STEADY,
    STEADY_GLM,
    Mistake,
    answer_to,
    assert_answers,
    corpus,
    write_recipe,
)

COMMAND_LINES = [m for name in ("command_line", "values", "checks") for m in corpus(name)]


def named(mistake: Mistake) -> str:
    return mistake.name


@pytest.mark.parametrize("mistake", corpus("recipes"), ids=named)
def test_a_mistake_below_the_defaults_list(mistake: Mistake, tmp_path: Path) -> None:
    answer = answer_to(write_recipe(tmp_path, DEFAULTS + mistake.given))
    line = DEFAULTS.count("\n") + mistake.line
    assert_answers(answer, (*mistake.says, f"(mine.yaml:{line})"))


@pytest.mark.parametrize("mistake", corpus("defaults"), ids=named)
def test_a_mistake_in_the_defaults_list(mistake: Mistake, tmp_path: Path) -> None:
    answer = answer_to(write_recipe(tmp_path, f"defaults:\n{mistake.given}"))
    assert_answers(answer, (*mistake.says, f"(mine.yaml:{mistake.line})"))


@pytest.mark.parametrize("mistake", COMMAND_LINES, ids=named)
def test_a_mistake_on_the_command_line(mistake: Mistake, tmp_path: Path) -> None:
    overrides = mistake.given.removesuffix("\n").split("\n")
    answer = answer_to(write_recipe(tmp_path, STEADY), overrides)
    assert_answers(answer, mistake.says)
    assert "(command line)" in answer or "(conf/" in answer


@pytest.mark.parametrize("mistake", corpus("glm_flash"), ids=named)
def test_a_mistake_about_glm_flash(mistake: Mistake, tmp_path: Path) -> None:
    overrides = mistake.given.removesuffix("\n").split("\n")
    answer = answer_to(write_recipe(tmp_path, STEADY_GLM), overrides)
    assert_answers(answer, mistake.says)
    assert "(command line)" in answer or "(conf/" in answer


WHOLE_FILES = {
    "a list instead of keys": ("- a\n- b\n", ("`key: value` lines", "(mine.yaml:1)")),
    "plain text": ("hello\n", ("`key: value` lines", "(mine.yaml:1)")),
    "nothing": ("", ("model: must be set", "data: must be set", "- /base")),
    "only comments": ("# later\n", ("model: must be set", "start the recipe with")),
    "an empty document": ("---\n", ("model: must be set", "- /base")),
    "two documents": ("---\na: 1\n---\nb: 2\n", ("a second document", "(mine.yaml:3)")),
    "no text": (b"\xff\xfe\x00", ("mine.yaml is not UTF-8 text",)),
    "a package": (f"# @package foo\n{DEFAULTS}", ("# @package foo", "(mine.yaml)")),
    "a later package": (f"# What\n\n#@package foo\n{DEFAULTS}", ("# @package foo", "remove")),
    "no list": ("defaults: /base\n", ("defaults: must be a list", "(mine.yaml:1)", "- _self_")),
    "an open list": ("defaults:\n", ("defaults: must be a list", "- /base")),
    "an empty list": ("defaults: []\n", ("defaults: the list must end with `- _self_`",)),
    "a misspelt list": ("defults:\n- /base\n- _self_\n", ("did you mean defaults?",)),
    "no base": ("training: {steps: 3}\n", ("model: must be set", "start the recipe with")),
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_a_file_that_is_no_recipe(name: str, tmp_path: Path) -> None:
    text, says = WHOLE_FILES[name]
    assert_answers(answer_to(write_recipe(tmp_path, text)), says)


FILE_NAMES = {
    "mine.yml": ("mine.yml: a recipe file ends in .yaml",),
    "mine": ("mine: a recipe file ends in .yaml",),
    "base.yaml": ("'base' is a reserved name", "give the recipe another name"),
    "model.yaml": ("'model' is a reserved name",),
    "hydra.yaml": ("'hydra' is a reserved name",),
}


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_file_name_that_cannot_be_used(name: str, tmp_path: Path) -> None:
    assert_answers(answer_to(write_recipe(tmp_path, DEFAULTS, name)), FILE_NAMES[name])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert_answers(answer_to(tmp_path / "mine.yaml"), ("cannot read mine.yaml: No such file",))


def test_a_folder_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").mkdir()
    assert_answers(answer_to(tmp_path / "mine.yaml"), ("cannot read mine.yaml", "directory"))


def test_recipes_that_extend_each_other(tmp_path: Path) -> None:
    write_recipe(tmp_path, "defaults:\n- mine\n- _self_\n", "other.yaml")
    answer = answer_to(write_recipe(tmp_path, "defaults:\n- other\n- _self_\n"))
    assert_answers(answer, ("defaults: 'mine' extends this one", "other.yaml:2"))


def test_a_mistake_in_the_recipe_that_is_extended(tmp_path: Path) -> None:
    write_recipe(tmp_path, f"{DEFAULTS}training:\n  stpes: 3\n", "parent.yaml")
    answer = answer_to(write_recipe(tmp_path, "defaults:\n- parent\n- _self_\n"))
    assert_answers(answer, ("training.stpes: there is no such key (parent.yaml:5)",))


@pytest.fixture
def own_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of conf/ that a test may break."""
    copy = tmp_path / "conf"
    shutil.copytree(CONF, copy)
    for module in (compose, explain, groups, origins):
        monkeypatch.setattr(module, "CONF", copy)
    groups.groups.cache_clear()
    yield copy
    groups.groups.cache_clear()


BROKEN_OPTIONS = {
    "a key twice": ("lr: 1e-3\nlr: 2e-3\n", ("lr: this key is given twice", "mine.yaml:2")),
    "no YAML": ("lr: [1\n", ("not YAML: a bracket is never closed", "mine.yaml:2")),
    "an unknown key": ("rl: 1\n", ("optimizer.rl: there is no such key", "mine.yaml:1")),
    "a wrong value": ("lr: fast\n", ("optimizer.lr: expected a number", "mine.yaml:1")),
    "a list": ("- 1\n", ("this file holds something else", "mine.yaml:1")),
    "a missing parent": ("defaults: [nope, _self_]\n", ("optimizer/nope",)),
}


@pytest.mark.parametrize("name", BROKEN_OPTIONS)
def test_an_option_of_the_users_own_that_is_wrong(
    name: str, own_conf: Path, tmp_path: Path
) -> None:
    text, says = BROKEN_OPTIONS[name]
    write_recipe(own_conf / "optimizer", text)
    answer = answer_to(write_recipe(tmp_path, STEADY, "recipe.yaml"), ["optimizer=mine"])
    assert_answers(answer, says)


def test_an_option_of_the_users_own_is_found(own_conf: Path, tmp_path: Path) -> None:
    write_recipe(own_conf / "optimizer", "defaults: [adamw, _self_]\nlr: 0.5\n")
    recipe = write_recipe(tmp_path, STEADY, "recipe.yaml")
    assert Ready(recipe, ["optimizer=mine"], None, anywhere=True).recipe.optimizer.lr == 0.5


def test_values_that_are_refused_together_point_to_the_one_just_given(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, f"{DEFAULTS}checkpoint: {{interval: 20}}\n")
    answer = answer_to(recipe, ["checkpoint.keep_latest_k=1"])
    assert_answers(answer, ("checkpoint", "keep_latest_k", "(command line)"))
    assert "mine.yaml" not in answer


@pytest.mark.parametrize("override", ["", " "])
def test_an_empty_override(override: str, tmp_path: Path) -> None:
    answer = answer_to(write_recipe(tmp_path, STEADY), [override])
    assert_answers(answer, (f"{override!r} has no '='", "write key=value"))


def test_a_line_break_in_an_override(tmp_path: Path) -> None:
    answer = answer_to(write_recipe(tmp_path, STEADY), ["description=a\nb"])
    assert_answers(answer, ("description: the value holds a line break",))


def test_a_group_chosen_for_a_recipe_without_groups(tmp_path: Path) -> None:
    answer = answer_to(write_recipe(tmp_path, "training: {steps: 3}\n"), ["model=moe_debug"])
    assert_answers(answer, ("model: mine.yaml has every value written out", "model.NAME=VALUE"))


@pytest.mark.parametrize("ngpu", [0, -2])
def test_no_ranks(ngpu: int, tmp_path: Path) -> None:
    answer = answer_to(write_recipe(tmp_path, STEADY), ngpu=ngpu)
    assert_answers(answer, (f"NGPU: {ngpu} ranks; it must be at least 1",))


def test_more_ranks_than_the_degrees(tmp_path: Path) -> None:
    overrides = ["parallelism.data_parallel_shard_degree=1"]
    answer = answer_to(write_recipe(tmp_path, STEADY), overrides, ngpu=2)
    assert_answers(answer, ("multiply to 1 (all 1), but the job has 2 ranks",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_on_a_machine_without(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, STEADY)
    with pytest.raises(RecipeError) as refusal:
        Ready(recipe, ["hardware.device=cuda"], None)
    assert_answers(str(refusal.value), ("hardware.device: ", "cuda"))


def test_the_command_line_prints_problems_and_returns_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch"])
    recipe = str(write_recipe(tmp_path, STEADY))
    words = ["check", "--recipe", recipe, "--", "training.stpes=5", "optimizer.lr=high"]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[0] == "2 problems:"
    assert "  training.stpes: there is no such key (command line)" in printed.err.splitlines()
    assert "      did you mean training.steps?" in printed.err.splitlines()
    assert "Traceback" not in printed.err


def test_the_steady_recipes_have_no_mistake_of_their_own(tmp_path: Path) -> None:
    for steady in (STEADY, STEADY_GLM):
        ready = Ready(write_recipe(tmp_path, steady), [], None, anywhere=True)
        assert (ready.ranks, ready.recipe.training.seq_len) == (1, 2048)


def test_no_two_mistakes_of_a_corpus_are_one() -> None:
    for file in sorted(CORPUS.glob("*.txt")):
        mistakes = corpus(file.stem)
        assert len({m.name for m in mistakes}) == len({m.given for m in mistakes}) == len(mistakes)
    assert len(list(CORPUS.glob("*.txt"))) == 10
