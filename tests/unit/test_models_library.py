"""TitanModel: torchtitan's own decoders by name."""

from typing import Any, get_args

import pytest
from torchtitan.models.common.decoder import Decoder

from components.models.library import TitanFamily, TitanModel, flavors


@pytest.mark.parametrize("family", get_args(TitanFamily))
def test_every_flavor_of_every_family_builds_a_decoder(family: Any) -> None:
    names = flavors(family)
    assert "debugmodel" in names
    for flavor in names:
        for attention in ("flex", "varlen"):
            spec = TitanModel(family=family, flavor=flavor).build_spec(attention)
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
        model.build_spec("flex")
    assert str(caught.value) == message


def test_ineffective_autotuning_is_refused() -> None:
    model = TitanModel(family="llama3", flavor="debugmodel", attention="varlen", flex_autotune=True)
    assert [key for key, _ in model.check()] == ["model.flex_autotune"]
