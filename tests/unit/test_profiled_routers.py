"""Every model with experts follows a routing profile, and its router still learns."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torchtitan.models.common.moe import MoE

from components.expert_dispatch.profiles import RoutingProfile
from components.models.library import TitanModel
from components.models.settings import ModelSettings
from components.titan.moe import force_balance
from components.titan.routing_profile import RouteCountingExperts, follow_profile
from launch.ready import Ready
from tests.training import losses, small_overrides, train, write_corpus
from tests.unit.config_support import (
    STEADY,
    Mistake,
    answer_to,
    assert_answers,
    corpus,
    write_recipe,
)
from tests.unit.models_support import tiny_glm, tiny_moe

MODELS = {
    "moe": tiny_moe(n_experts=8),
    "moe_softmax": tiny_moe(n_experts=8, score_func="softmax", route_norm=False),
    "glm_flash": tiny_glm(),
    "glm_flash_groups": tiny_glm(n_expert_groups=4, n_limited_groups=2),
    "gpt_oss": TitanModel(family="gpt_oss", flavor="debugmodel"),
    "deepseek_v3": TitanModel(family="deepseek_v3", flavor="debugmodel"),
    "qwen3": TitanModel(family="qwen3", flavor="debugmodel_moe"),
}
BATCH, LENGTH = 2, 10


def layer(model: ModelSettings, profile: str) -> MoE:
    """The last expert layer of a model that follows ``profile``, with initial weights."""
    spec = model.build_spec()
    follow_profile(spec.model, RoutingProfile.parse(profile))
    config = spec.model.layers[-1].moe
    force_balance(config.router, True)
    torch.manual_seed(0)
    built = config.build()
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.05)
    return built.train()


def tokens(moe: MoE) -> torch.Tensor:
    width = moe.router.gate.in_features
    return torch.randn(BATCH, LENGTH, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("profile", ["balanced", "70/3", "50/1"])
def test_the_profile_chooses_and_the_router_weighs(name: str, profile: str) -> None:
    moe = layer(MODELS[name], profile)
    router = moe.router
    weights, ids, scores = router(tokens(moe), moe.expert_bias_E)
    expected = RoutingProfile.parse(profile).expert_ids(
        BATCH * LENGTH, router.top_k, router.num_experts, "cpu"
    )
    assert torch.equal(ids.view(BATCH * LENGTH, -1), expected)
    mine = scores.gather(-1, ids)
    if router.route_norm:
        mine = mine / (mine.sum(-1, keepdim=True) + 1e-20)
    torch.testing.assert_close(weights, mine * router.route_scale)
    (weights * torch.arange(1.0, 1 + router.top_k)).sum().backward()
    assert router.gate.weight.grad is not None and router.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["moe", "glm_flash", "gpt_oss"])
def test_tokens_that_visit_an_expert_twice_are_computed_twice(name: str) -> None:
    """Both routes of a hot token carry the same expert's output, weighted by its score."""
    moe = layer(MODELS[name], "50/1")
    assert isinstance(moe.routed_experts, RouteCountingExperts)
    x = tokens(moe)
    if name == "gpt_oss":
        # Its experts always return bfloat16.
        moe, x = moe.bfloat16(), x.bfloat16()
    weights, ids, _ = moe.router(x, moe.expert_bias_E)
    shared = moe.shared_experts(x) if moe.shared_experts is not None else 0.0
    found = (moe(x) - shared).flatten(0, 1)
    experts = moe.routed_experts.inner_experts
    expected = torch.zeros_like(found)
    for expert in range(moe.router.num_experts):
        counts = torch.zeros(moe.router.num_experts, dtype=torch.int64)
        counts[expert] = len(expected)
        out = experts(x.flatten(0, 1), counts)
        weight = (weights * (ids == expert)).sum(-1).view(-1, 1)
        expected = expected + out.float() * weight
    tolerance = 1e-5 if name.startswith("glm") else 2e-2
    assert (found - expected).abs().max() < tolerance * expected.abs().max()
    assert moe.tokens_per_expert_E[0] == BATCH * LENGTH / 2


def test_layers_without_repeated_visits_keep_torchtitans_experts() -> None:
    assert not isinstance(layer(MODELS["moe"], "70/3").routed_experts, RouteCountingExperts)


def test_a_layer_that_cannot_follow_is_refused() -> None:
    with pytest.raises(ValueError, match="debug.routing_profile: '50/9': 9 hot experts are more"):
        layer(MODELS["moe"], "50/9")


def test_a_run_routes_as_its_recipe_says_and_recomputes_the_same(tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "corpus")
    changes = [
        "model=glm_flash_tiny",
        "debug.routing_profile=50/1",
        "components.layer_recompute.enabled=true",
        "metrics.expert_load=true",
        "training.steps=2",
    ]
    train(tmp_path / "run", [*small_overrides(text), *changes])
    line = json.loads((tmp_path / "run/expert_load.jsonl").read_text().splitlines()[0])
    # 256 tokens: 128 visit expert 0 twice, which counts as one token; 128 visit two of the others.
    for counts in (c for name, c in line.items() if name != "step"):
        assert counts[0] == 128 and sum(counts[1:]) == 256 and max(counts[1:]) <= 38
    first, second = losses(tmp_path / "run")
    assert second < first


@pytest.mark.parametrize("mistake", corpus("routing_profile"), ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_profile(mistake: Mistake, tmp_path: Path) -> None:
    overrides = mistake.given.removesuffix("\n").split("\n")
    answer = answer_to(write_recipe(tmp_path, STEADY), overrides)
    assert_answers(answer, mistake.says)
    assert "(command line)" in answer


def test_a_profile_that_fits_passes_the_checks(tmp_path: Path) -> None:
    settings = ["debug.routing_profile=80/7"]
    ready = Ready(write_recipe(tmp_path, STEADY), settings, None, anywhere=True)
    assert ready.recipe.debug.profile == RoutingProfile(80, 7)


DENSE = """\
defaults:
- /base
- override /model: llama3_debug
- override /data: stdlib
- _self_
hardware: {ranks: 1, device: cpu}
training: {seq_len: 2048}
"""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], "debug.routing_profile: 'balanced' finds no router: the model has no experts"),
        (["model.flavor=9B"], "model.flavor: '9B' is no flavor of llama3"),
    ],
)
def test_a_model_without_experts_has_nothing_to_route(
    settings: list[str], says: str, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, DENSE)
    answer = answer_to(recipe, ["debug.routing_profile=balanced", *settings])
    assert_answers(answer, (says,))
    # One complaint: of a model that does not exist nothing else is known.
    assert len([line for line in answer.splitlines() if not line.startswith(" ")]) == 1
