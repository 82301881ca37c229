"""Recipes as files: found by name or path, listed from their text, copied under a new name."""

import subprocess
import sys
from pathlib import Path

import pytest

from components.core.problems import RecipeError
from launch.config.groups import RECIPES, ROOT, reserved_names
from launch.recipes import Entry, find_recipe, list_recipes, new_recipe, table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "quickstart.yaml").write_text(
        "# make train RECIPE=quickstart training.steps=3\n"
        "# make train RECIPE=quickstart_big\n"
        "description: small\nhardware: {ranks: 1}\n"
    )
    (tmp_path / "big.yaml").write_text(
        "defaults:\n  - /base\n  - override /hardware: h200\n  - _self_\n"
        "description: >\n  two\n  lines\nhardware:\n  ranks: 16\n"
    )
    (tmp_path / "child.yaml").write_text("defaults: [big, _self_]\ndescription: extends big\n")
    return tmp_path


def test_recipes_are_listed_with_quickstart_first(folder: Path) -> None:
    assert list_recipes(folder) == [
        Entry("quickstart", "small", "1 x cpu or gpu"),
        Entry("big", "two lines", "16 x h200"),
        Entry("child", "extends big", "16 x h200"),
    ]


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("a: [1\nb: 2\n", "cannot be read: not valid YAML (line 2)"),
        ("- a\n", "cannot be read: not a mapping of settings"),
        ("hardware: h200\n", "cannot be read: hardware is not a mapping"),
        ("", ""),
    ],
)
def test_a_broken_recipe_does_not_hide_the_others(
    folder: Path, text: str, description: str
) -> None:
    (folder / "broken.yaml").write_text(text)
    entries = {entry.name: entry for entry in list_recipes(folder)}
    assert entries["broken"].description == description
    assert len(entries) == 4


def test_recipes_that_extend_each_other_in_a_circle_are_listed(folder: Path) -> None:
    (folder / "big.yaml").write_text("defaults: [child, _self_]\n")
    assert len(list_recipes(folder)) == 3


def test_the_table_is_aligned() -> None:
    entries = [Entry("a", "first", "1 x cpu"), Entry("longer", "", "any")]
    assert table(entries).splitlines() == [
        "RECIPE  HARDWARE  DESCRIPTION",
        "a       1 x cpu   first",
        "longer  any",
    ]


def test_every_recipe_of_the_project_says_what_it_does_and_where() -> None:
    for entry in list_recipes(RECIPES):
        assert entry.description, entry.name
        assert "cannot be read" not in entry.description
        assert entry.hardware != "?"


def test_listing_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys; from launch.recipes import list_recipes; from pathlib import Path;"
        "list_recipes(Path('recipes')); print({'torch', 'hydra'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("asked", ["big", "big.yaml"])
def test_a_recipe_is_found_by_name(folder: Path, asked: str) -> None:
    assert find_recipe(asked, folder) == folder / "big.yaml"


def test_a_recipe_anywhere_is_found_by_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "elsewhere" / "mine.yaml"
    mine.parent.mkdir()
    mine.touch()
    assert find_recipe(str(mine), folder) == mine
    monkeypatch.setenv("HOME", str(mine.parent))
    assert find_recipe("~/mine.yaml", folder) == mine
    monkeypatch.chdir(mine.parent)
    assert find_recipe("mine.yaml", folder) == Path("mine.yaml")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("quikstart", "there is no recipe 'quikstart'\n    did you mean quickstart?"),
        ("zzz", "there is no recipe 'zzz'\n    `make recipes` lists them"),
        ("{folder}/bigg.yaml", "bigg.yaml'\n    did you mean {folder}/big.yaml"),
        ("{folder}", "'{folder}' is a folder\n    name a file in it: {folder}/big.yaml"),
    ],
)
def test_what_is_no_recipe_is_answered_with_the_nearest(
    folder: Path, asked: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        find_recipe(asked.format(folder=folder), folder)
    assert message.format(folder=folder) in str(caught.value)


def test_a_new_recipe_is_a_copy_whose_commands_start_it(folder: Path) -> None:
    said = new_recipe("mine", "quickstart", folder)
    assert (folder / "mine.yaml").read_text() == (
        "# make train RECIPE=mine training.steps=3\n"
        "# make train RECIPE=quickstart_big\n"
        "description: small\nhardware: {ranks: 1}\n"
    )
    assert "make train RECIPE=mine" in said
    assert "make check RECIPE=mine" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "needs a name"),
        ("", "needs a name"),
        ("big", "exists already"),
        ("base", "reserved name"),
        ("data", "reserved name"),
        ("mine.yaml", "RECIPE=mine"),
        ("sub/mine", "is no file name"),
        ("../mine", "is no file name"),
        ("-mine", "is no file name"),
        ("two words", "is no file name"),
    ],
)
def test_names_that_cannot_be_a_new_recipe_are_refused(
    folder: Path, name: str | None, message: str
) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(RecipeError, match=message):
        new_recipe(name, "quickstart", folder)
    assert sorted(folder.iterdir()) == before


def test_an_unknown_source_is_answered_with_the_nearest(folder: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean quickstart"):
        new_recipe("mine", "quickstrt", folder)
    assert not (folder / "mine.yaml").exists()


def test_no_recipe_of_the_project_has_a_reserved_name() -> None:
    assert not reserved_names() & {entry.name for entry in list_recipes(RECIPES)}
