"""Every file of conf/model, bound the way a recipe binds it."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from components.models.counts import count_parameters
from components.models.glm_flash.settings import GlmFlashModel
from components.models.settings import ModelSettings
from launch.config.binder import Binder
from launch.config.schema import field_docs, init_fields
from tests.unit.models_support import big_moe, tiny_glm, tiny_moe

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def composed(name: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+model={name}"])
    data = OmegaConf.to_container(config, resolve=True)
    assert isinstance(data, dict)
    return data["model"]


def bound(name: str) -> ModelSettings:
    binder = Binder()
    settings = binder.bind(ModelSettings, composed(name), "model")
    assert binder.problems == []
    return settings


def test_all_model_files_are_known_here() -> None:
    assert NAMES == [
        "glm_flash", "glm_flash_4layer", "glm_flash_tiny", "gpt_oss_120b", "gpt_oss_20b",
        "llama3_debug", "moe_120b", "moe_241b", "moe_667b", "moe_debug", "moe_slice", "moe_tiny",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_model_file_binds_checks_and_builds(name: str) -> None:
    settings = bound(name)
    assert settings.check() == []
    config = settings.build_spec().model
    assert settings.vocab_size == config.vocab_size
    assert settings.max_seq_len == config.max_seq_len
    assert settings.n_layers == len(config.layers)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_file_spells_out_every_setting(name: str) -> None:
    # What a file does not mention cannot be overridden on the command line without a plus sign.
    given = set(composed(name)) - {"_target_"}
    assert given == set(init_fields(type(bound(name))))


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_documented(name: str) -> None:
    settings = type(bound(name))
    assert set(init_fields(settings)) <= set(field_docs(settings))


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("moe_120b", 122_088_694_784),
        ("moe_241b", 241_310_182_400),
        ("moe_667b", 667_101_209_600),
        ("moe_slice", 5_216_390_144),
        ("moe_debug", 164_672),
        ("moe_tiny", 3_429_504),
        ("glm_flash", 313_326_799_870),
        ("glm_flash_4layer", 4_452_875_800),
        ("glm_flash_tiny", 1_921_028),
    ],
)
def test_a_model_file_has_the_size_it_says(name: str, total: int) -> None:
    assert count_parameters(bound(name).build_spec()).total == total


def test_the_deeper_files_differ_in_depth_alone() -> None:
    published = {"rope_theta": 10_000_000.0}
    assert bound("moe_120b") == big_moe(**published)
    assert bound("moe_241b") == big_moe(**published, n_layers=14)
    assert bound("moe_667b") == big_moe(**published, n_layers=39)
    assert bound("moe_slice") == big_moe(**published, n_layers=2, n_experts=24)
    assert bound("moe_debug") == tiny_moe(load_balance_coeff=0.01)


def test_the_glm_flash_files_differ_in_what_they_say() -> None:
    assert bound("glm_flash") == GlmFlashModel()
    assert bound("glm_flash_tiny") == tiny_glm(
        kda_kernel="reference",
        sparse_mla_kernel="torch",
        indexer_kernel="torch",
        hyper_connections_kernel="torch",
    )
    four = ["kda", "kda", "kda", "dsa"]
    slice_ = GlmFlashModel(n_layers=4, layer_types=four, n_dense_layers=1, n_experts=32)
    assert bound("glm_flash_4layer") == slice_
