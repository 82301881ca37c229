"""From files and overrides to one mapping: precedence, grammar, and who set what."""

from pathlib import Path
from typing import Any

import pytest

from components.core.problems import RecipeError
from launch.config.compose import Composed, compose
from launch.config.groups import CONF, RECIPES, groups, recipe_names, reserved_names
from launch.config.load import load_recipe
from launch.config.origins import place_of
from launch.config.overrides import parse_overrides
from launch.config.sources import read
from tests.unit.config_support import DEFAULTS, STEADY, write_recipe


def composed(folder: Path, *overrides: str, text: str = STEADY) -> Composed:
    return compose(write_recipe(folder, text), list(overrides))


def value_of(data: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        data = data[part]
    return data


VALUES = [
    ("one", "one"),
    ("two words", "two words"),
    ("'a, b'", "a, b"),
    ('"a, b"', "a, b"),
    ("''", ""),
    ("", ""),
    ("a=b", "a=b"),
    ("a:b", "a:b"),
    ("it's", "it's"),
    ("'it\\'s'", "it's"),
    ('say "x"', 'say "x"'),
    ("größe", "größe"),
    ("'größe'", "größe"),
    ("~/x", "~/x"),
    ("/tmp/my runs/x", "/tmp/my runs/x"),
    ("C:\\x", "C:\\x"),
    ("50% (a|b) #1!", "50% (a|b) #1!"),
    ("s3://bucket/a?b=c&d=e", "s3://bucket/a?b=c&d=e"),
    ("$HOME", "$HOME"),
    ("off", "off"),
    ("3", 3),
    ("'3'", "3"),
    ("3.5", 3.5),
    ("1e3", 1000.0),
    ("1_000", 1000),
    ("true", True),
    ("null", None),
    (" 3 ", 3),
    ("-1", -1),
    ("128k", "128k"),
    ("[]", []),
    ("[1, a b, 'c,d', [x]]", [1, "a b", "c,d", ["x"]]),
    ("[.*norm.*,'\\.bias$']", [".*norm.*", "\\.bias$"]),
    ("{a: 1, b: [x, y]}", {"a": 1, "b": ["x", "y"]}),
    ("{}", {}),
]


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_an_override_means_what_is_written(sign: str, tmp_path: Path) -> None:
    overrides = [f"{sign}section.k{i}={text}" for i, (text, _) in enumerate(VALUES)]
    assignments, problems = parse_overrides(overrides)
    assert problems == []
    read_by_hydra = composed(tmp_path, *overrides).data["section"]
    for number, (assignment, (text, value)) in enumerate(zip(assignments, VALUES, strict=True)):
        assert assignment.key == f"section.k{number}"
        assert (text, assignment.value) == (text, value)
        assert (text, read_by_hydra[f"k{number}"]) == (text, value)
        assert type(assignment.value) is type(read_by_hydra[f"k{number}"]) is type(value)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["training.steps=3", "training.steps=4"], "training.steps", 4),
        (["training.steps=4", "+training.steps=5"], "training.steps", 5),
        (["training.steps=3", "training={steps: 5}"], "training.steps", 5),
        (["training={steps: 5}", "training.steps=3"], "training.steps", 3),
        (["training={seq_len: 1k}"], "training.steps", 60),
        (["model.dim=64", "model=moe_tiny"], "model.dim", 64),
        (["model=moe_tiny", "model.dim=64"], "model.dim", 64),
        (["model={dim: 64}"], "model.top_k", 2),
        (["data=text", "data=stdlib"], "data._target_", "data.corpus.StdlibCorpus"),
        (["+data=text"], "data._target_", "data.corpus.TextCorpus"),
        (["training.steps=${training.seq_len}"], "training.steps", 2048),
        (["output_dir=runs/${hardware.name}"], "output_dir", "runs/any"),
        (["optimizer.betas=[0.5,0.6]"], "optimizer.betas", [0.5, 0.6]),
        (["launch.skypilot.env.A=x"], "launch.skypilot.env", {"A": "x"}),
    ],
    ids=str,
)
def test_the_last_override_wins(
    overrides: list[str], key: str, value: object, tmp_path: Path
) -> None:
    assert value_of(composed(tmp_path, *overrides).data, key) == value


def test_files_apply_from_the_base_to_the_recipe(tmp_path: Path) -> None:
    write_recipe(tmp_path, f"{DEFAULTS}training: {{steps: 5, gc_freq: 7}}\n", "parent.yaml")
    child = "defaults:\n- parent\n- override /model: moe_tiny\n- _self_\ntraining: {steps: 6}\n"
    data = composed(tmp_path, text=child).data
    assert data["training"]["steps"] == 6
    assert data["training"]["gc_freq"] == 7
    assert data["training"]["disable_cuda_graphs"] is True
    assert data["model"]["vocab_size"] == read(CONF / "model/moe_tiny.yaml").keys["vocab_size"][0]


def test_a_list_replaces_the_list_before_it(tmp_path: Path) -> None:
    parent = f"{DEFAULTS}optimizer: {{no_decay: [norm, bias]}}\n"
    write_recipe(tmp_path, parent, "parent.yaml")
    child = "defaults:\n- parent\n- _self_\noptimizer: {no_decay: [embed]}\n"
    assert composed(tmp_path, text=child).data["optimizer"]["no_decay"] == ["embed"]


@pytest.mark.parametrize("entry", ["quickstart", "/quickstart"])
def test_a_recipe_anywhere_extends_one_of_the_projects(entry: str, tmp_path: Path) -> None:
    data = composed(tmp_path, text=f"defaults:\n- {entry}\n- _self_\n").data
    assert data == compose(RECIPES / "quickstart.yaml", []).data


def test_files_beside_a_recipe_replace_none_of_the_projects(tmp_path: Path) -> None:
    write_recipe(tmp_path, "training: {steps: 1}\n", "base.yaml")
    write_recipe(tmp_path, "_target_: os.system\n", "model/moe_debug.yaml")
    clean = write_recipe(tmp_path / "other", STEADY)
    assert composed(tmp_path).data == compose(clean, []).data


@pytest.mark.parametrize(
    "name",
    ["with space.yaml", "sub dir/mine.yaml", "qwen3.5_1x.yaml", "a=b.yaml", "größe.yaml",
     "a,b/[1].yaml", "it's.yaml", "a$b/mine.yaml", "-x.yaml", "{a}.yaml"],
)  # fmt: skip
def test_a_recipe_may_have_any_path(name: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, STEADY, name)
    assert compose(recipe, ["training.steps=7"]).data["training"]["steps"] == 7


def test_a_recipe_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path, STEADY)
    monkeypatch.chdir(tmp_path)
    result = compose(Path("mine.yaml"), [])
    assert result.origins["training.steps"] == "mine.yaml:20"
    assert result.path == tmp_path.resolve() / "mine.yaml"


@pytest.mark.parametrize(
    "text",
    ["\ufeff" + STEADY, STEADY.replace("\n", "\r\n"), f"# @package _global_\n{STEADY}",
     f"---\n{STEADY}", STEADY.replace("steps: 60", "steps: &n 60")],
    ids=["byte order mark", "Windows", "package", "document", "anchor"],
)  # fmt: skip
def test_harmless_forms_of_a_file_are_read(text: str, tmp_path: Path) -> None:
    assert composed(tmp_path, text=text).data["training"]["steps"] == 60


ORIGINS = """\
defaults:
- parent
- override /model: moe_241b
- _self_
training:
  steps: 6
launch:
  skypilot:
    env: {A: x, B: y}
"""


def test_every_key_knows_the_line_that_set_it(tmp_path: Path) -> None:
    write_recipe(tmp_path, f"{DEFAULTS}training:\n  gc_freq: 7\n  steps: 5\n", "parent.yaml")
    result = composed(tmp_path, "training.max_norm=2", "launch.skypilot.env.B=z", text=ORIGINS)
    folder = tmp_path.resolve()
    assert result.origins["training.steps"] == f"{folder}/mine.yaml:6"
    assert result.origins["training.gc_freq"] == f"{folder}/parent.yaml:5"
    assert result.origins["training.max_norm"] == "command line"
    assert result.origins["training.disable_cuda_graphs"].startswith("conf/base.yaml:")
    assert result.origins["model.n_layers"].startswith("conf/model/moe_241b.yaml:")
    assert result.origins["model.n_experts"].startswith("conf/model/moe_120b.yaml:")
    assert result.origins["data.tokenizer"].startswith("conf/data/stdlib.yaml:")
    assert result.origins["launch.skypilot.env.A"] == f"{folder}/mine.yaml:9"
    assert result.origins["launch.skypilot.env.B"] == "command line"


def test_lines_are_those_of_the_files(tmp_path: Path) -> None:
    result = composed(tmp_path)
    for key, place in result.origins.items():
        file, _, line = place.rpartition(":")
        path = Path(file) if Path(file).is_absolute() else CONF.parent / file
        text = path.read_text().splitlines()[int(line) - 1]
        assert key.rpartition(".")[2] in text, (key, place)


def test_a_mapping_on_the_command_line_sets_only_its_keys(tmp_path: Path) -> None:
    origins = composed(tmp_path, "model={dim: 64, head_dim: 16}").origins
    assert origins["model.dim"] == origins["model.head_dim"] == "command line"
    assert origins["model.n_heads"].endswith("mine.yaml:11")
    assert origins["model.rope_theta"].startswith("conf/model/moe_debug.yaml:")


def test_a_choice_on_the_command_line_points_into_the_chosen_file(tmp_path: Path) -> None:
    origins = composed(tmp_path, "data=text").origins
    assert origins["data.paths"].startswith("conf/data/text.yaml:")
    assert "stdlib" not in " ".join(origins.values())


def test_a_value_in_place_of_a_section_leaves_nothing_of_it(tmp_path: Path) -> None:
    origins = composed(tmp_path, "training=null").origins
    assert origins["training"] == "command line"
    assert not [key for key in origins if key.startswith("training.")]


def test_a_section_in_place_of_a_value_is_found(tmp_path: Path) -> None:
    assert composed(tmp_path, "training.steps.a=1").origins["training.steps"] == "command line"


ANCHOR = """\
comm: &c
  trace_buf_size: 9
  mode: default
profiler:
  mode: own
  <<: *c
"""


def test_keys_of_an_anchor_point_to_the_anchor_and_own_keys_win(tmp_path: Path) -> None:
    result = composed(tmp_path, text=DEFAULTS + ANCHOR)
    assert result.data["profiler"] == {"trace_buf_size": 9, "mode": "own"}
    assert result.origins["profiler.trace_buf_size"].endswith("mine.yaml:5")
    assert result.origins["profiler.mode"].endswith("mine.yaml:8")


def test_the_place_of_a_key_is_its_own_or_the_nearest() -> None:
    origins = {"a": "f:1", "a.b": "f:2", "c.d.e": "f:3"}
    assert place_of(origins, "a.b") == "f:2"
    assert place_of(origins, "a.b[3]") == "f:2"
    assert place_of(origins, "a.x.y") == "f:1"
    assert place_of(origins, "c") == "f:3"
    assert place_of(origins, "z.z") == ""


def test_problems_of_the_file_and_of_the_command_line_come_together(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refusal:
        composed(tmp_path, "training", "data=off", text="defaults:\n- /base\n")
    assert [problem.path for problem in refusal.value.problems] == ["defaults", "", "data"]


def test_a_reference_is_followed_before_the_recipe_is_typed(tmp_path: Path) -> None:
    loaded = load_recipe(write_recipe(tmp_path, STEADY), ["training.steps=${training.seq_len}"])
    assert loaded.recipe.training.steps == 2048


def test_an_environment_variable_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_FOLDER", "elsewhere")
    with pytest.raises(RecipeError, match="output_dir: settings do not come from the environment"):
        composed(tmp_path, "output_dir=${oc.env:SOME_FOLDER}")


def test_conf_holds_plain_options_only() -> None:
    files = sorted(CONF.rglob("*.yaml"))
    assert {file.parent for file in files} == {CONF, *(CONF / group for group in groups())}
    for file in files:
        parsed = read(file)
        assert parsed.package == ""
        entries = [entry for entry, _ in parsed.defaults or []]
        assert entries == [] or entries[-1] == "_self_", file
        assert file.read_text().startswith("# "), f"{file} must say what it is for"


def test_no_recipe_of_the_project_has_a_reserved_name() -> None:
    assert not set(recipe_names()) & reserved_names()
    assert {"base", "model", "data", "hydra"} <= reserved_names()
