"""TitanModel: torchtitan's own decoders by name."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from torchtitan.models.common.decoder import Decoder

from components.models.library import TitanFamily, TitanModel, flavors
from components.models.position import LibraryPosition
from components.models.titan_attention import TitanAttention
from launch.config.groups import RECIPES
from launch.config.load import load_recipe

ALONE = SimpleNamespace(tensor_parallel_degree=1, expert_parallel_degree=1)


@pytest.mark.parametrize("family", get_args(TitanFamily))
def test_every_flavor_of_every_family_builds_a_decoder(family: Any) -> None:
    names = flavors(family)
    assert "debugmodel" in names
    for flavor in names:
        for attention in get_args(TitanAttention):
            spec = TitanModel(family=family, flavor=flavor, attention=attention).build_spec()
            assert (spec.name, spec.flavor) == (family, flavor)
            assert isinstance(spec.model, Decoder.Config)
            inner = type(spec.model.first_attention.inner_attention).__qualname__
            assert inner.lower().startswith(attention)


def test_shape_is_read_from_torchtitan() -> None:
    model = TitanModel(family="gpt_oss", flavor="20b")
    assert (model.n_layers, model.vocab_size, model.max_seq_len) == (24, 201_088, 131_072)
    assert model.check() == []


@pytest.mark.parametrize(
    ("family", "flavor", "message"),
    [
        (
            "gpt_oss",
            "20B",
            "model.flavor: '20B' is no flavor of gpt_oss; did you mean 20b or 120b? "
            "legal: debugmodel, 20b, 120b",
        ),
        (
            "gpt_oss",
            "huge",
            "model.flavor: 'huge' is no flavor of gpt_oss; legal: debugmodel, 20b, 120b",
        ),
        (
            "llama4",
            "8B",
            "model.family: 'llama4' is no decoder family of torchtitan; did you mean llama3? "
            "legal: deepseek_v3, gpt_oss, llama3, qwen3",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_legal_ones(
    family: Any, flavor: str, message: str
) -> None:
    model = TitanModel(family=family, flavor=flavor)
    assert [f"{key}: {text}" for key, text in model.check()] == [message]
    with pytest.raises(ValueError) as caught:
        model.build_spec()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("family", "flavor", "experts"),
    [("gpt_oss", "20b", 32), ("deepseek_v3", "16B", 64), ("qwen3", "8B", None)],
)
def test_experts_are_read_from_the_layers_that_have_them(
    family: Any, flavor: str, experts: int | None
) -> None:
    assert TitanModel(family=family, flavor=flavor).n_experts == experts


@pytest.mark.parametrize(
    "model",
    [
        TitanModel(family="llama4", flavor="8B"),  # type: ignore[arg-type]
        TitanModel(family="llama3", flavor="huge"),
    ],
    ids=["family", "flavor"],
)
def test_a_model_that_does_not_exist_can_be_asked_and_fits_everything(model: TitanModel) -> None:
    assert len(model.check()) == 1
    assert model.n_experts is None
    assert min(model.vocab_size, model.max_seq_len, model.n_layers) > 10**12


def test_a_wrong_switch_does_not_hide_the_shape() -> None:
    model = TitanModel(family="llama3", flavor="8B", attention="varlen", flex_autotune=True)
    assert model.check() and model.n_layers == 32


@pytest.mark.parametrize(
    ("tensor", "experts", "refused"), [(2, 1, True), (2, 2, False), (1, 1, False)]
)
def test_gpt_oss_experts_refuse_to_be_sliced(tensor: int, experts: int, refused: bool) -> None:
    """Their second bias would be added once on every tensor rank."""
    degrees = [
        f"parallelism.tensor_parallel_degree={tensor}",
        f"parallelism.expert_parallel_degree={experts}",
    ]
    recipe = load_recipe(RECIPES / "gpt_oss_20b_128k_8xh200.yaml", degrees).recipe
    found = recipe.model.check_run(recipe)
    assert [key for key, _ in found] == ["parallelism.tensor_parallel_degree"] * refused
    assert all("expert_parallel_degree of 2 or more" in message for _, message in found)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_gpt_oss_experts_refuse_float32(family: Any) -> None:
    model = TitanModel(family=family, flavor="debugmodel")
    found = []
    for dtype in ("bfloat16", "float32"):
        training = SimpleNamespace(mixed_precision_param=dtype, seq_len=2048)
        recipe: Any = SimpleNamespace(training=training, parallelism=ALONE)
        found += model.check_run(recipe)
    message = (
        "'float32' fails in torchtitan's gpt-oss experts, which always return bfloat16; "
        "use bfloat16"
    )
    wanted = [("training.mixed_precision_param", message)]
    assert found == (wanted if family == "gpt_oss" else [])


def test_ineffective_autotuning_is_refused() -> None:
    model = TitanModel(family="llama3", flavor="debugmodel", attention="varlen", flex_autotune=True)
    assert [key for key, _ in model.check()] == ["model.flex_autotune"]


GPT_OSS: dict[str, Any] = {"family": "gpt_oss", "flavor": "20b"}
LLAMA: dict[str, Any] = {"family": "llama3", "flavor": "8B"}
TWICE: dict[str, Any] = {"factor": 2.0, "original_seq_len": 4096}
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "alibi": (
        GPT_OSS | {"position": LibraryPosition(kind="alibi")},
        "model.position.kind: 'alibi': torchtitan's decoders are published with rotary embeddings; "
        "legal: 'rope' (the others: components.models.moe.MoEModel)",
    ),
    "stretched_llama": (
        LLAMA | {"position": LibraryPosition(scaling="ntk", **TWICE)},
        "model.position.scaling: 'ntk' is not offered for llama3; legal: 'library'",
    ),
    "factor_of_llama": (
        LLAMA | {"position": LibraryPosition(factor=2.0)},
        "model.position.factor: 2.0 is not offered for llama3; legal: 1.0",
    ),
    "llama_ramp": (
        GPT_OSS | {"position": LibraryPosition(scaling="llama", **TWICE)},
        "model.position.scaling: 'llama' is not offered for gpt_oss; "
        "legal: 'library', 'none', 'linear', 'ntk', 'yarn'",
    ),
    "theta": (
        LLAMA | {"rope_theta": 0.0},
        "model.rope_theta: 0.0 is not positive; legal: above 0, or null",
    ),
    "temperature": (
        GPT_OSS | {"position": LibraryPosition(scaling="yarn", mscale=0.5, **TWICE)},
        "model.position.mscale: 0.5: gpt-oss's attention has its own temperature; legal: 1",
    ),
    "unused_factor": (
        GPT_OSS | {"position": LibraryPosition(factor=2.0)},
        "model.position.factor: 2.0 has no effect with model.position.scaling = 'library'; "
        "legal: 1.0, or model.position.scaling 'linear', 'ntk' or 'yarn'",
    ),
}


@pytest.mark.parametrize(("settings", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_positions_that_a_published_model_cannot_have(settings: dict, message: str) -> None:
    found = TitanModel(**settings).check()
    assert [f"{key}: {text}" for key, text in found] == [message]


def test_a_sequence_beyond_the_stretched_context_is_refused() -> None:
    model = TitanModel(**GPT_OSS, position=LibraryPosition(scaling="yarn", **TWICE))
    assert model.check() == []
    assert model.max_seq_len == 8192
    training = SimpleNamespace(mixed_precision_param="bfloat16", seq_len=16_384)
    recipe: Any = SimpleNamespace(training=training, parallelism=ALONE)
    ((key, message),) = model.check_run(recipe)
    assert key == "model.position.factor"
    assert message.startswith("2.0 x model.position.original_seq_len = 8192 tokens")
    assert message.endswith("training.seq_len is 16384; legal: 4 or more")
