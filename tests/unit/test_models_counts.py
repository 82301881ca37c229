"""Parameter counts, checked against arithmetic written out here and against published numbers."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from components.models.counts import Counts, count_parameters
from components.models.library import TitanModel
from components.models.moe import MoEModel
from tests.unit.models_support import big_moe, tiny_moe

# One layer of the MoE family.
ATTENTION = 7168 * (56 + 8 + 8) * 128 + 56 * 128 * 7168  # q, k, v and the output projection
EXPERT = 3 * 7168 * 2048  # gate, up, down
ROUTER = 384 * 7168
NORMS = 2 * 7168
VOCABULARY = 200_000 * 7168  # one of the two matrices
FINAL_NORM = 7168

# layers: total, active per token
FAMILY = {
    7: (122_088_694_784, 4_741_309_440),
    14: (241_310_182_400, 8_049_011_712),
    39: (667_101_209_600, 19_862_234_112),
}


@pytest.mark.parametrize("n_layers", FAMILY)
def test_the_moe_family_counts_to_the_unit(n_layers: int) -> None:
    layer = ATTENTION + 384 * EXPERT + ROUTER + NORMS
    visited = ATTENTION + 8 * EXPERT + ROUTER + NORMS
    counts = count_parameters(big_moe(n_layers=n_layers).build_spec())
    assert counts.total == n_layers * layer + 2 * VOCABULARY + FINAL_NORM
    assert counts.active_per_token == n_layers * visited + VOCABULARY + FINAL_NORM
    assert (counts.total, counts.active_per_token) == FAMILY[n_layers]


@pytest.mark.parametrize(
    ("n_layers", "context", "tokens_per_second", "teraflops"),
    [
        (7, 2**17, 1355, 91),
        (7, 2**20, 642, 221),
        (14, 2**17, 866, 110),
        (14, 2**20, 314, 213),
        (39, 2**17, 316, 107),
        (39, 2**20, 124, 233),
    ],
)
def test_active_counts_explain_the_published_throughput(
    n_layers: int, context: int, tokens_per_second: int, teraflops: int
) -> None:
    # Forward and backward: 6 per active parameter, and causal attention over the context.
    per_token = 6 * FAMILY[n_layers][1] + 6 * n_layers * context * 7168
    assert tokens_per_second * per_token / 1e12 == pytest.approx(teraflops, rel=0.012)


def test_the_slice_has_5_216_billion_parameters() -> None:
    layer = ATTENTION + 24 * EXPERT + 24 * 7168 + NORMS
    counts = count_parameters(big_moe(n_layers=2, n_experts=24).build_spec())
    assert counts.total == 2 * layer + 2 * VOCABULARY + FINAL_NORM == 5_216_390_144


@pytest.mark.parametrize(
    ("flavor", "total", "active", "experts_and_router", "attention", "vocabulary"),
    [("20b", 20.91, 3.61, 19.12, 0.64, 1.16), ("120b", 116.83, 5.13, 114.71, 0.96, 1.16)],
)
def test_gpt_oss_matches_its_published_table(
    flavor: str,
    total: float,
    active: float,
    experts_and_router: float,
    attention: float,
    vocabulary: float,
) -> None:
    model = TitanModel(family="gpt_oss", flavor=flavor)
    counts = count_parameters(model.build_spec())
    assert counts.total / 1e9 == pytest.approx(total, abs=0.005)
    assert counts.active_per_token / 1e9 == pytest.approx(active, abs=0.005)
    mlp = counts.routed_experts + counts.router + counts.norms
    assert mlp / 1e9 == pytest.approx(experts_and_router, abs=0.006)
    assert counts.attention / 1e9 == pytest.approx(attention, abs=0.006)
    assert (counts.embedding + counts.lm_head) / 1e9 == pytest.approx(vocabulary, abs=0.005)


@pytest.mark.parametrize(
    "model",
    [
        tiny_moe(),
        tiny_moe(n_shared_experts=1, n_dense_layers=1, dense_hidden_dim=96, qk_norm=True),
        tiny_moe(tie_embeddings=True),
        TitanModel(family="llama3", flavor="debugmodel"),
    ],
    ids=["plain", "shared_and_dense", "tied", "dense_llama3"],
)
def test_the_parts_add_up_to_the_built_model(model: MoEModel | TitanModel) -> None:
    spec = model.build_spec()
    counts = count_parameters(spec)
    built = sum(parameter.numel() for parameter in spec.model.build().parameters())
    assert counts.total == built == sum(parts_of(counts).values())
    assert counts.other == counts.indexer == counts.hyper_connections == 0


def test_active_counts_shared_experts_and_dense_layers_whole() -> None:
    model = tiny_moe(n_shared_experts=1, n_dense_layers=1, dense_hidden_dim=96)
    counts = count_parameters(model.build_spec())
    expert = 3 * 64 * 64
    assert counts.routed_experts == 4 * expert
    assert counts.shared_experts == expert
    assert counts.dense_ffn == 3 * 64 * 96
    assert counts.active_per_token == counts.total - 320 * 64 - 2 * expert


def test_a_tied_matrix_counts_once_and_is_active() -> None:
    untied = count_parameters(tiny_moe().build_spec())
    tied = count_parameters(tiny_moe(tie_embeddings=True).build_spec())
    assert (tied.embedding, tied.lm_head) == (0, untied.lm_head)
    assert tied.total == untied.total - untied.embedding
    assert tied.active_per_token == untied.active_per_token


def parts_of(counts: Counts) -> dict[str, int]:
    fields = dataclasses.asdict(counts)
    return {name: fields[name] for name in fields if name not in ("total", "active_per_token")}


def test_a_parameter_outside_the_known_parts_is_counted_as_other() -> None:
    spec = tiny_moe().build_spec()
    spec.model = spec.model.lm_head
    counts = count_parameters(spec)
    assert counts.other == counts.total == counts.active_per_token == 320 * 64
    assert sum(parts_of(counts).values()) == counts.total


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("norm.weight", "norms"),
        ("layers.0.ffn_norm.weight", "norms"),
        ("layers.0.attention_norm.weight", "norms"),
        ("layers.0.attention.q_norm.weight", "attention"),
        ("layers.0.attention.indexer.k_norm.weight", "indexer"),
        ("layers.0.attention.indexer.compress_ape", "indexer"),
        ("layers.0.attention_hc.fn", "hyper_connections"),
        ("layers.0.ffn_hc.affine.base", "hyper_connections"),
        ("mtp.0.enorm.weight", "other"),
        ("mtp.0.norm.proj.weight", "other"),
        ("norm", "other"),
        ("scale", "other"),
    ],
)
def test_a_name_tells_which_part_a_parameter_belongs_to(name: str, part: str) -> None:
    parent = torch.nn.Module()
    *modules, leaf = name.split(".")
    module = parent
    for each in modules:
        module.add_module(each, torch.nn.Module())
        module = module.get_submodule(each)
    module.register_parameter(leaf, torch.nn.Parameter(torch.empty(3)))
    model = SimpleNamespace(build=lambda: parent)
    counts = count_parameters(SimpleNamespace(model=model, name="x"))  # type: ignore[arg-type]
    assert {key: n for key, n in parts_of(counts).items() if n} == {part: 3}


@pytest.mark.parametrize("tied", [False, True])
def test_torchtitan_reports_the_same_size_and_the_flops_of_the_active_part(tied: bool) -> None:
    model = tiny_moe(tie_embeddings=tied, n_dense_layers=1, dense_hidden_dim=96, head_dim=32)
    spec = model.build_spec()
    counts = count_parameters(spec)
    with torch.device("meta"):
        built = spec.model.build()
    size, flops_per_token = spec.model.get_nparams_and_flops(built, 1024)
    assert size == counts.total
    attention = 12 * model.n_layers * model.n_heads * model.head_dim * 1024
    assert flops_per_token == 6 * counts.active_per_token + attention
