"""GlmFlashModel: what it refuses, which kernels it takes, and its size to the unit."""

import dataclasses
import importlib.util
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.config.configs import CompileConfig, ParallelismConfig

from components.models.counts import Counts, count_parameters
from components.models.glm_flash.settings import GlmFlashModel
from components.models.settings import KernelChoice
from tests.unit.models_support import tiny_glm

# The published model, written out: D, KDA's inner width Q, and parts of one layer.
D, Q = 4096, 64 * 128
KDA = (
    3 * Q * D + 3 * Q * 4  # q, k, v and their convolutions
    + 2 * (128 * D + Q * 128) + 64 * D  # two low-rank gates, beta
    + 64 + Q + 128  # A_log, dt_bias, output norm
    + D * Q
)  # fmt: skip
MLA = 1536 * D + 1536 + 64 * 256 * 1536 + 512 * D + 512 + 64 * 512 * 512 + D * 64 * 256
INDEXER = 32 * 128 * 1536 + 128 * D + 2 * 128 + 32 * D + 4 * 128 + 128 * D
EXPERT = 3 * D * 2048
SITES = 2 * (24 * 4 * D + 24 + 3)
VOCABULARY = 154_880 * D
TOTAL = 313_326_799_870


@cache
def published() -> Counts:
    return count_parameters(GlmFlashModel().build_spec())


def test_the_parts_of_a_layer_are_the_documented_ones() -> None:
    parts = (KDA, MLA, INDEXER, EXPERT, SITES)
    assert parts == (137_732_288, 117_442_560, 7_471_872, 25_165_824, 786_486)


def test_the_published_model_counts_to_the_unit() -> None:
    assert published() == Counts(
        total=TOTAL,
        active_per_token=16_742_321_150,
        embedding=634_388_480,
        lm_head=634_388_480,
        attention=4_682_897_792 + 1_291_868_160,
        indexer=82_190_592,
        dense_ffn=452_984_832,
        routed_experts=304_405_807_104,
        shared_experts=1_056_964_608,
        router=49_545_216,
        hyper_connections=35_391_870,
        norms=368_640 + 4_096,
        other=0,
    )


def test_the_counts_follow_from_the_widths() -> None:
    counts = published()
    assert counts.embedding == counts.lm_head == VOCABULARY
    assert counts.attention == 34 * KDA + 11 * MLA
    assert counts.indexer == 11 * INDEXER
    assert counts.dense_ffn == 3 * 3 * D * 12_288
    assert counts.routed_experts == 42 * 288 * EXPERT
    assert counts.shared_experts == 42 * EXPERT
    assert counts.router == 42 * 288 * D
    assert counts.hyper_connections == 45 * SITES
    assert counts.norms == 45 * 2 * D + D
    assert counts.total - counts.active_per_token == VOCABULARY + 42 * 280 * EXPERT


def test_the_routing_bias_is_a_buffer_also_when_it_is_frozen() -> None:
    for coefficient in (0.0, 1e-3):
        with torch.device("meta"):
            model = tiny_glm(load_balance_coeff=coefficient).build_spec().model.build()
        biases = [name for name, _ in model.named_buffers() if name.endswith("expert_bias_E")]
        assert biases == [f"layers.{n}.moe.expert_bias_E" for n in (1, 2, 3)]
        assert not any("expert_bias_E" in name for name, _ in model.named_parameters())
        assert all(f"{name}" in model.state_dict() for name in biases)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kda_alone": {"layer_types": ["kda"] * 4},
    "dsa_alone": {"layer_types": ["dsa"] * 4},
    "one_stream": {"hc_mult": 1},
    "no_shared_expert": {"n_shared_experts": 0},
    "two_shared_experts": {"n_shared_experts": 2},
    "all_dense": {"n_dense_layers": 4, "n_experts": None},
    "no_dense": {"n_dense_layers": 0},
    "groups": {"n_expert_groups": 4, "n_limited_groups": 2},
    "top_1": {"top_k": 1, "route_norm": False},
    "frozen_bias": {"load_balance_coeff": 0.0},
    "one_token_per_pool": {"index_kpool": 1},
    "uneven_widths": {"qk_head_dim": 24, "v_head_dim": 40, "kda_heads": 3, "conv_kernel": 2},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_check_accepts_a_variant_whose_parts_add_up(changes: dict[str, Any]) -> None:
    model = tiny_glm(**changes)
    assert model.check() == []
    spec = model.build_spec()
    counts = dataclasses.asdict(count_parameters(spec))
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in spec.model.build().parameters())
    total, _ = counts.pop("total"), counts.pop("active_per_token")
    assert total == built == sum(counts.values())
    assert counts["other"] == 0
    assert (counts["indexer"] == 0) == ("dsa" not in model.layer_types)
    assert (counts["routed_experts"] == 0) == (model.n_experts is None)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no_width": ({"q_lora_rank": 0}, "model.q_lora_rank: 0 is too small; legal: 1 or more"),
    "negative_experts": ({"n_experts": -8}, "model.n_experts: -8 is too small; legal: 1 or more"),
    "negative_dense": (
        {"n_dense_layers": -1},
        "model.n_dense_layers: -1 is too small; legal: 0 or more",
    ),
    "nan_balancing": (
        {"load_balance_coeff": float("nan")},
        "model.load_balance_coeff: nan is too small; legal: 0 or more",
    ),
    "nan_limit": (
        {"swiglu_limit": float("nan")},
        "model.swiglu_limit: nan is not positive; legal: above 0",
    ),
    "nan_bound": (
        {"gate_lower_bound": float("nan")},
        "model.gate_lower_bound: nan is no log decay that KDA can compute; "
        "legal: -5 or more, and below 0",
    ),
    "short_list": (
        {"layer_types": ["kda"]},
        "model.layer_types: the list has 1 entry and model.n_layers is 4; "
        "legal: 4 entries, each kda or dsa, or model.n_layers 1",
    ),
    "empty_list": (
        {"layer_types": []},
        "model.layer_types: the list has 0 entries and model.n_layers is 4; "
        "legal: 4 entries, each kda or dsa",
    ),
    "unknown_mixer": (
        {"layer_types": ["kda", "kda", "kda", "mla"]},
        "model.layer_types[3]: 'mla' is no mixer; legal: kda, dsa",
    ),
    "pool": (
        {"index_kpool": 3},
        "model.index_kpool: 3 does not divide model.index_topk = 128, and whole pools are "
        "selected; nearest legal: 2 or 4, or model.index_topk 126 or 129",
    ),
    "pool_above_topk": (
        {"index_kpool": 256},
        "model.index_kpool: 256 does not divide model.index_topk = 128, and whole pools are "
        "selected; nearest legal: 128, or model.index_topk 256",
    ),
    "top_k": ({"top_k": 9}, "model.top_k: 9 is more than model.n_experts = 8; legal: 1 to 8"),
    "top_k_in_groups": (
        {"n_expert_groups": 4, "n_limited_groups": 1, "top_k": 3},
        "model.top_k: 3 is more than the 2 experts of model.n_limited_groups = 1 of "
        "model.n_expert_groups = 4 groups; legal: 1 to 2, or more groups",
    ),
    "groups": (
        {"n_expert_groups": 8, "n_limited_groups": 8},
        "model.n_expert_groups: 8 does not cut model.n_experts = 8 into equal groups of 2 or "
        "more; legal: 1, 2, 4",
    ),
    "limited_groups": (
        {"n_expert_groups": 2, "n_limited_groups": 3},
        "model.n_limited_groups: 3 is more than model.n_expert_groups = 2; legal: 1 to 2",
    ),
    "top_1_normalised": (
        {"top_k": 1},
        "model.route_norm: true with model.top_k = 1 makes every routing weight the same, so the "
        "router would learn nothing; legal: false, or model.top_k 2 or more",
    ),
    "ragged_expert": (
        {"expert_hidden_dim": 4},
        "model.expert_hidden_dim: 4 does not suit the experts' grouped matrix multiplication; "
        "legal: a multiple of 8, such as 8",
    ),
    "no_experts": (
        {"n_experts": None},
        "model.n_experts: null with model.n_dense_layers = 1 of model.n_layers = 4 leaves the "
        "others without experts; legal: 1 or more, or model.n_dense_layers 4",
    ),
    "idle_experts": (
        {"n_dense_layers": 4},
        "model.n_experts: 8 has no effect where all model.n_layers = 4 are dense; legal: null, "
        "or model.n_dense_layers 0 to 3",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSALS.values(), ids=REFUSALS)
def test_check_names_the_key_the_value_and_what_is_legal(
    changes: dict[str, Any], message: str
) -> None:
    found = tiny_glm(**changes).check()
    assert [f"{key}: {text}" for key, text in found] == [message]


@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(GlmFlashModel) if f.type is int]
)
def test_every_number_has_a_smallest_legal_value(name: str) -> None:
    assert f"model.{name}" in [key for key, _ in tiny_glm(**{name: -1}).check()]


def test_building_refuses_with_all_problems_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        tiny_glm(index_kpool=3, top_k=9, layer_types=["kda"]).build_spec()
    keys = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert keys == ["model.layer_types", "model.index_kpool", "model.top_k"]


def found_in_run(model: GlmFlashModel, **parallelism: Any) -> list[str]:
    compile = parallelism.pop("compile", CompileConfig())
    recipe: Any = SimpleNamespace(parallelism=ParallelismConfig(**parallelism), compile=compile)
    return [f"{key}: {message}" for key, message in model.check_run(recipe)]


def test_expert_and_data_parallelism_fit_this_model() -> None:
    assert found_in_run(tiny_glm(), expert_parallel_degree=2, data_parallel_shard_degree=2) == []
    loss_only = CompileConfig(enable=True, components=["loss"])
    assert found_in_run(tiny_glm(), compile=loss_only) == []


PLAIN: dict[str, Any] = {
    "kda_kernel": "reference", "sparse_mla_kernel": "torch", "indexer_kernel": "torch",
    "hyper_connections_kernel": "torch",
}  # fmt: skip


def test_auto_takes_the_reference_on_a_cpu() -> None:
    lacking = "its kernels run on CUDA only, and this run is on the cpu"
    model = tiny_glm(hyper_connections_kernel="auto")
    assert model.choose_kernels("cpu") == KernelChoice(
        notes=(
            "KDA kernel: reference (auto on cpu)",
            f"sparse_mla kernel: torch (auto on cpu; not tilelang: {lacking})",
            f"indexer kernel: torch (auto on cpu; not triton: {lacking})",
            f"hyper_connections kernel: torch (auto on cpu; not triton: {lacking})",
        )
    )
    for device in ("cpu", "cuda"):
        choice = tiny_glm(**PLAIN).choose_kernels(device)
        assert choice == KernelChoice(
            notes=(
                "KDA kernel: reference",
                "sparse_mla kernel: torch",
                "indexer kernel: torch",
                "hyper_connections kernel: torch",
            )
        )


@pytest.mark.parametrize(("wanted", "because"), [("auto", " (auto on cuda)"), ("fla", "")])
def test_a_gpu_takes_fla_for_the_recurrence_and_the_convolution(wanted: Any, because: str) -> None:
    choice = tiny_glm(**{**PLAIN, "kda_kernel": wanted}).choose_kernels("cuda")
    assert [factory.__name__ for factory in choice.overrides] == ["fla_kda", "fla_short_conv"]
    assert choice.notes[0] == f"KDA kernel: fla{because}"


def test_fla_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError) as caught:
        tiny_glm(kda_kernel="fla").choose_kernels("cpu")
    assert str(caught.value) == (
        "model.kda_kernel: 'fla' runs on CUDA only, and this run is on the cpu; "
        "legal here: 'reference' or 'auto'"
    )


@pytest.mark.parametrize("wanted", ["auto", "fla"])
def test_a_missing_fla_is_an_error_and_not_a_slow_run(
    wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = rf"model.kda_kernel: '{wanted}' needs the package fla-core on CUDA.*'reference'"
    with pytest.raises(ValueError, match=message):
        tiny_glm(kda_kernel=wanted).choose_kernels("cuda")
    assert tiny_glm(**PLAIN).choose_kernels("cuda").overrides == ()


@pytest.mark.parametrize("width", [8, 288])
def test_a_head_width_that_fla_lacks_is_refused_where_fla_would_run(width: int) -> None:
    model = tiny_glm(kda_head_dim=width)
    assert model.check() == [] and model.choose_kernels("cpu").overrides == ()
    with pytest.raises(ValueError, match=f"model.kda_head_dim: {width} is no .* legal: 16 to 256"):
        model.choose_kernels("cuda")
