"""Every recipe of the project composes, passes its checks for its own hardware, and replays."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from components.core.registry import enabled_components
from components.core.sizes import local_tokens
from components.core.units import TOKENS
from components.models.titan_attention import TitanAttentionSettings
from launch.config import freeze
from launch.config.groups import RECIPES, groups
from launch.config.load import bind_recipe, load_recipe
from launch.config.sources import read
from launch.ready import Ready

pytestmark = pytest.mark.recipes

FILES = sorted(RECIPES.glob("*.yaml"))
NAME = re.compile(
    r"(?P<model>[a-z][a-z0-9_]*?)_(?P<context>[0-9]+[km])_(?P<ranks>[0-9]+)x(?P<gpu>[a-z0-9]+)"
    r"(_(?P<what>[a-z0-9_]+))?"
)


@cache
def ready(file: Path) -> Ready:
    """The recipe after every check of `make check`, for the hardware that it names."""
    return Ready(file, [], None, anywhere=True)


def each_recipe(test):  # type: ignore[no-untyped-def]
    return pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)(test)


@each_recipe
def test_it_composes_binds_and_passes_every_check(file: Path) -> None:
    recipe = ready(file).recipe
    assert recipe.training.steps > 0
    ranks = recipe.hardware.ranks
    assert ranks == "auto" or ready(file).ranks == ranks


@each_recipe
def test_it_replays_from_its_frozen_form(file: Path, tmp_path: Path) -> None:
    recipe = ready(file).recipe
    frozen = tmp_path / "recipe.yaml"
    freeze.write(recipe, frozen, [])
    assert bind_recipe(yaml.safe_load(frozen.read_text())) == recipe
    assert load_recipe(frozen, []).recipe == recipe


@each_recipe
def test_its_header_says_what_it_is_and_names_recipes_that_exist(file: Path) -> None:
    lines = file.read_text().splitlines()
    header = [line for line in lines[: lines.index("defaults:")] if line.startswith("#")]
    assert len(header[0]) > 20
    named = re.findall(r"RECIPE=([\w.-]+)", "\n".join(header))
    assert set(named) <= {"mine", *(recipe.stem for recipe in FILES)}


@each_recipe
def test_it_describes_itself_in_one_line(file: Path) -> None:
    keys = read(file).keys
    assert "description" in keys, "the line of `make recipes` is not inherited"
    description = ready(file).recipe.description
    assert 20 <= len(description) <= 110
    assert "\n" not in description


def test_the_recipes_tell_themselves_apart() -> None:
    descriptions = {file.stem: read(file).keys["description"][0] for file in FILES}
    assert len(set(descriptions.values())) == len(descriptions)


@each_recipe
def test_a_name_says_model_context_ranks_and_gpu(file: Path) -> None:
    recipe = ready(file).recipe
    if recipe.hardware.name == "any":
        assert not NAME.fullmatch(file.stem), "a recipe with hardware in its name must set it"
        return
    match = NAME.fullmatch(file.stem)
    assert match, "<model>_<context>_<n>x<gpu>[_<what>]"
    assert match["model"] in groups()["model"]
    assert recipe.training.seq_len == TOKENS.parse(match["context"])
    assert recipe.hardware.ranks == int(match["ranks"])
    assert recipe.hardware.name == match["gpu"]
    assert recipe.hardware.device == "cuda"


@each_recipe
def test_the_model_in_its_name_is_the_one_it_trains(file: Path) -> None:
    match = NAME.fullmatch(file.stem)
    if match is None:
        return
    origins = ready(file).composed.origins
    option = RECIPES.parent / "conf" / "model" / f"{match['model']}.yaml"
    for key, (_, place) in read(option).keys.items():
        if key != "flex_autotune":  # the baselines take FlexAttention as it ships
            assert origins[f"model.{key}"] == str(place)


def test_there_are_recipes_for_a_first_run_and_for_two_ranks() -> None:
    assert {"quickstart", "moe_debug_2rank"} <= {file.stem for file in FILES}
    quickstart = ready(RECIPES / "quickstart.yaml").recipe
    assert (quickstart.hardware.device, quickstart.hardware.ranks) == ("auto", 1)


@each_recipe
def test_experts_of_many_ranks_are_planned_and_in_chunks_where_there_is_enough_to_cut(
    file: Path,
) -> None:
    recipe = ready(file).recipe
    many = recipe.parallelism.expert_parallel_degree > 2 and "fsdp2" not in file.stem
    settings = recipe.components
    # gpt-oss's experts have biases, which no plan can take apart.
    planned = many and not file.stem.startswith("gpt_oss")
    chunks = planned and local_tokens(recipe) >= 8192
    assert (settings.llep.enabled, settings.pipelined_llep.enabled) == (planned != chunks, chunks)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*_fsdp2.yaml")), ids=lambda path: path.stem)
def test_a_baseline_uses_torchtitans_own_techniques_alone(path: Path) -> None:
    recipe = load_recipe(path, []).recipe
    on = {component.name for component in enabled_components(recipe.components)}
    assert on == {"chunked_loss", "full_recompute"}
    if isinstance(recipe.model, TitanAttentionSettings):
        assert recipe.model.flex_autotune
