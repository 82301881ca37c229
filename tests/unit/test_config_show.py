"""The frozen recipe of a run, and `make show`."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.core.recipe import Recipe
from components.titan.optimizer import AdamWSettings
from launch.config import freeze
from launch.config.compose import compose
from launch.config.explain import chosen_classes
from launch.config.groups import ROOT
from launch.config.load import Loaded, bind_recipe, load_recipe
from launch.config.schema import walk
from launch.config.show import leaves, show
from tests.unit.config_support import STEADY, write_recipe


def loaded(folder: Path, *overrides: str, text: str = STEADY) -> Loaded:
    return load_recipe(write_recipe(folder, text), list(overrides))


def frozen(recipe: Recipe, folder: Path) -> Path:
    path = folder / "recipe.yaml"
    freeze.write(recipe, path, ["first line", "second line"])
    return path


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data=text", "data.paths=['a b.txt','c,d.txt']"],
        ["model=gpt_oss_20b"],
        ["hardware.ranks=auto", "hardware.memory=90GiB", "debug.seed=null"],
        ["launch.skypilot.env={A: '3', B: 'null', C: ''}", "launch.skypilot.setup=['a: b', '#']"],
        ["optimizer.lr=1e-8", "optimizer.betas=[0, 0.999999999]", "training.max_norm=1e30"],
    ],
    ids=str,
)
def test_a_frozen_recipe_binds_to_an_equal_one(overrides: list[str], tmp_path: Path) -> None:
    text = STEADY if "model=gpt_oss_20b" not in overrides else "defaults:\n- /base\n- _self_\n"
    recipe = loaded(tmp_path, *overrides, text=text).recipe
    path = frozen(recipe, tmp_path)
    assert bind_recipe(yaml.safe_load(path.read_text())) == recipe
    # As `make train RECIPE=<run>/recipe.yaml` reads it.
    assert load_recipe(path, []).recipe == recipe
    assert path.read_text().startswith("# first line\n# second line\n")


WORDS = [
    "3",
    "1e-3",
    "1_000",
    "0x1F",
    "010",
    "24:00:00",
    "null",
    "true",
    "off",
    "~",
    "a: b",
    "# x",
    "2020-01-01",
    "it's",
    '"',
    "größe",
    " x ",
    "",
    "inf",
    "- a",
    "@x",
    "a\\b",
    "%",
    "=",
    "<<",
]


def test_text_stays_text_in_a_frozen_recipe(tmp_path: Path) -> None:
    recipe = loaded(tmp_path).recipe
    recipe.launch.skypilot.setup = WORDS
    recipe.launch.skypilot.env = {f"{number} {word}": word for number, word in enumerate(WORDS)}
    path = frozen(recipe, tmp_path)
    for data in (yaml.safe_load(path.read_text()), compose(path, []).data):
        assert data["launch"]["skypilot"]["setup"] == WORDS
        assert data["launch"]["skypilot"]["env"] == recipe.launch.skypilot.env


def test_a_frozen_recipe_takes_overrides_of_keys(tmp_path: Path) -> None:
    path = frozen(loaded(tmp_path).recipe, tmp_path)
    again = load_recipe(path, ["training.steps=3", "model.dim=64"]).recipe
    assert (again.training.steps, again.model.dim) == (3, 64)  # type: ignore[attr-defined]


def test_a_section_names_its_class_only_where_one_is_chosen(tmp_path: Path) -> None:
    plain = freeze.to_plain(loaded(tmp_path).recipe)
    assert plain["model"]["_target_"] == "components.models.moe.MoEModel"
    assert plain["data"]["_target_"] == "data.corpus.StdlibCorpus"
    named = [path for path, _ in leaves(plain) if path.endswith("_target_")]
    assert named == ["model._target_", "data._target_"]


def test_plain_data_holds_no_objects() -> None:
    plain = freeze.to_plain({"a": (1, Path("b")), "c": AdamWSettings()})
    assert plain["a"] == [1, "b"]
    assert plain["c"]["betas"] == [0.9, 0.95]
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Key -> (value, origin)."""
    found = {}
    for line in text.splitlines():
        left, _, origin = line.partition("  # ")
        key, _, value = left.partition(": ")
        found[key] = (value.strip(), origin)
    return found


def test_show_names_the_value_and_the_origin_of_every_key_that_is_set(tmp_path: Path) -> None:
    result = loaded(tmp_path, "training.steps=7", "model={dim: 64}")
    shown = rows(show(result))
    assert shown["training.steps"] == ("7", "command line")
    assert shown["training.seq_len"][0] == "2048"
    assert shown["training.seq_len"][1].endswith("mine.yaml:18")
    assert shown["model.dim"] == ("64", "command line")
    assert shown["model.n_heads"][1].endswith("mine.yaml:11")
    assert shown["model.max_seq_len"][0] == "16384"
    assert shown["model._target_"][0] == '"components.models.moe.MoEModel"'
    assert shown["debug.seed"] == ("0", result.composed.origins["debug.seed"])
    assert "training.gc_freq" not in shown


def test_show_loses_no_key_that_something_sets(tmp_path: Path) -> None:
    result = loaded(tmp_path, "launch.skypilot.env={A: x}", "data=text", "data.paths=[LICENSE]")
    shown = rows(show(result))
    set_keys = {path for path, _ in leaves(result.composed.data)}
    assert set_keys <= set(shown)
    assert all(origin for _, origin in shown.values())


def test_show_all_adds_every_other_key_with_its_default_and_its_documentation(
    tmp_path: Path,
) -> None:
    result = loaded(tmp_path)
    everything = rows(show(result, everything=True))
    classes = chosen_classes(result.composed.data)
    keys = {key.path for key in walk(Recipe, classes=classes)}
    below_null = {key for key in keys if everything.get(key.rpartition(".")[0], ("",))[0] == "null"}
    assert keys - below_null <= set(everything)
    value, origin = everything["training.gc_freq"]
    assert value == "50"
    assert origin.startswith("default. Python garbage")
    assert everything["training.steps"] == rows(show(result))["training.steps"]


def test_a_section_set_by_a_reference_is_shown_with_its_place(tmp_path: Path) -> None:
    text = STEADY + "launch:\n  skypilot:\n    env: {A: x}\n    setup: ['${..env.A}']\n"
    result = loaded(
        tmp_path, "launch.slurm.time=${description}", "description='1:00:00'", text=text
    )
    shown = rows(show(result))
    assert shown["launch.slurm.time"] == ('"1:00:00"', "command line")
    assert shown["launch.skypilot.setup"][0] == '["x"]'


def test_show_may_be_piped_into_head() -> None:
    command = f"{sys.executable} -m launch show --recipe quickstart --all -- | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("description: ")
