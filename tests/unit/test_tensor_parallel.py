"""GLM-5.3-Flash over tensor ranks: what is cut, what is refused, what a rank keeps."""

from typing import Any

import pytest
import spmd_types as spmd
import torch
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.protocols.module import Module

from components.core.base import Target
from components.core.registry import component_types, enabled_components
from components.core.sizes import local_tokens, mixed_tokens
from components.models.glm_flash.saved_bytes import saved_bytes
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.sharding import set_sharding
from components.models.glm_flash.tensor_parallel import part_of_rank
from components.models.glm_flash.working_set import form_of, layer_bytes, working_sets
from components.offload.layout import units_of
from components.recompute.terms import choices
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from launch.ready import Ready
from tests.unit.models_support import tiny_glm

DEGREE = "parallelism.tensor_parallel_degree"
QUIET = ["components.full_recompute.enabled=false", "components.chunked_loss.enabled=false"]


def recipe(*overrides: str) -> Any:
    return load_recipe(RECIPES / "quickstart.yaml", [*QUIET, *overrides]).recipe


def findings(*overrides: str) -> dict[str, str]:
    loaded = recipe(*overrides)
    return dict(loaded.model.check_run(loaded))


def cuts(*, expert_parallel: bool) -> dict[str, Any]:
    """Of every parameter of one layer of each kind, how tensor ranks hold it."""
    config = tiny_glm(n_layers=2, layer_types=["kda", "dsa"], n_dense_layers=1).build_spec().model
    set_sharding(config, expert_parallel=expert_parallel)
    found = {}
    for name, each, *_ in config.traverse(Module.Config, recurse=True):
        with torch.device("meta"):
            module = each.build()
        for parameter, _ in module.named_parameters(recurse=False):
            layout = each.sharding_config.state_shardings[parameter].per_axis_spmd_types()
            found[f"{name}.{parameter}"] = layout.get(MeshAxisName.TP, "spread")
    return found


BY_HEAD = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "q_conv.weight", "k_conv.weight",
    "v_conv.weight", "f_b_proj.weight", "g_b_proj.weight", "attention.b_proj.weight", "core.A_log",
    "core.dt_bias", "q_b_proj.weight", "kv_b_proj.weight",
)  # fmt: skip
BY_WIDTH = ("w1.weight", "w3.weight", "tok_embeddings.weight", "lm_head.weight")
BY_INPUT = ("attention.o_proj.weight", "w2.weight")


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_heads_and_inner_widths_are_cut_and_the_rest_is_whole(expert_parallel: bool) -> None:
    experts = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    seen = set()
    for name, cut in cuts(expert_parallel=expert_parallel).items():
        expected: Any = spmd.R
        if name.endswith(BY_HEAD + BY_WIDTH):
            expected = spmd.S(0)
        elif name.endswith(BY_INPUT):
            expected = spmd.S(1)
        elif name.endswith(tuple(experts)):
            expected = "spread" if expert_parallel else experts[name.rpartition(".")[2]]
        assert cut == expected, name
        seen |= {end for end in BY_HEAD + BY_WIDTH + BY_INPUT if name.endswith(end)}
    assert seen == {*BY_HEAD, *BY_WIDTH, *BY_INPUT}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.kda_heads=6"],
            "4 does not divide model.kda_heads = 6; legal: 1, 2",
        ),
        (
            ["model.n_heads=2", "model.vocab_size=322"],
            "4 does not divide model.n_heads = 2 and model.vocab_size = 322; legal: 1, 2",
        ),
        (
            ["model.expert_hidden_dim=16"],
            "4 does not divide model.expert_hidden_dim = 16 into multiples of 8; legal: 1, 2",
        ),
    ],
)
def test_uneven_parts_are_refused_with_the_legal_degrees(
    overrides: list[str], message: str
) -> None:
    assert findings(f"{DEGREE}=4", *overrides) == {DEGREE: message}
    assert findings(f"{DEGREE}=2", *overrides) == {}


def test_experts_that_are_spread_are_not_cut() -> None:
    spread = "parallelism.expert_parallel_degree=4"
    assert findings(f"{DEGREE}=4", "model.expert_hidden_dim=16", spread) == {}


def test_streams_that_every_rank_would_hold_are_refused() -> None:
    off = "parallelism.enable_sequence_parallel=false"
    assert findings(off) == {}
    (message,) = findings(f"{DEGREE}=2", off).values()
    assert message.startswith(f"false with {DEGREE} 2") and f"legal: true, or {DEGREE} 1" in message


def test_the_table_of_what_combines_is_what_the_checks_say() -> None:
    """Validators are asked about every component; the README prints what they answer."""
    refused, combined = [], []
    for name in component_types():
        if name == "context_parallel":
            continue
        loaded = recipe(f"{DEGREE}=2", "hardware.ranks=2", f"components.{name}.enabled=true")
        found = [f"{key}: {message}" for key, message in loaded.model.check_run(loaded)]
        for component in enabled_components(loaded.components):
            found += [f"{p.path}: {p.message}" for p in component.check(loaded, Target("cpu", 2))]
        because = [line for line in found if f"{DEGREE} 2" in line]
        assert all(line.startswith(f"components.{name}.enabled") for line in because), because
        (refused if because else combined).append(name)
    text = (RECIPES.parent / "README.md").read_text()
    for names, what in ((combined, "combine"), (refused, "refused")):
        row = f"| {', '.join(f'`{name}`' for name in names)} | {what} |"
        assert row in text.split("beside `tensor_parallel_degree`")[1]


def test_a_rank_has_some_heads_and_keeps_fewer_bytes_by_the_degree() -> None:
    one, two = recipe(), recipe(f"{DEGREE}=2")
    assert (mixed_tokens(two), local_tokens(two)) == (local_tokens(one), local_tokens(one) // 2)
    part = part_of_rank(two.model, two)
    assert (part.kda_heads, part.n_heads, part.dense_hidden_dim) == (2, 2, 128)
    assert part.expert_hidden_dim == 64
    assert part_of_rank(one.model, one) is one.model
    # Inputs of mixers and SwiGLUs are whole on every rank, and so are low ranks; what a chunk of
    # queries takes is the same.
    for sizes, most in ((layer_bytes, 0.75), (working_sets, 1)):
        wholes, splits = (sizes(each.model, each, "cpu") for each in (one, two))
        assert all(
            whole / 2 <= split < most * whole for whole, split in zip(wholes, splits, strict=True)
        )


@pytest.mark.parametrize(("experts", "width"), [(1, 64), (2, 128)])
def test_parts_of_a_layer_are_counted_as_they_see_the_tokens(experts: int, width: int) -> None:
    two = recipe(f"{DEGREE}=2", f"parallelism.expert_parallel_degree={experts}")
    tokens, form = local_tokens(two), form_of(two.model, two, "cpu")
    part = part_of_rank(two.model, two)
    assert part.expert_hidden_dim == width
    for layer, found in enumerate(layer_bytes(two.model, two, "cpu")):
        outer = saved_bytes(two.model, layer, tokens, form)
        inner = saved_bytes(part, layer, 2 * tokens, form)
        mixing = ["attention", *(["feed_forward"] if layer == 0 else [])]
        expected = sum(size for name, size in outer.items() if name not in mixing)
        expected += sum(inner[name] for name in mixing)
        if layer and experts == 1:
            expected += inner["moe"] - outer["moe"]
        elif layer:
            # The shared expert's input: the tokens of both ranks.
            expected += 2 * tokens * two.model.dim * form.itemsize
        assert found == expected


def test_what_is_kept_for_recomputation_is_counted_before_ranks_are_summed() -> None:
    on = [
        "components.layer_recompute.enabled=true",
        "components.sublayer_chunking.enabled=true",
        "components.sublayer_chunking.chunk_tokens=64",
    ]
    one, two = recipe(*on), recipe(*on, f"{DEGREE}=2")
    for whole, split in zip(units_of(one), units_of(two), strict=True):
        assert split.boundary * 2 == whole.boundary
        assert split.held == whole.held
    assert choices(one) == choices(two)
    spread = recipe(*on, f"{DEGREE}=2", "parallelism.expert_parallel_degree=2")
    routed = 8 * two.model.top_k * 3 * mixed_tokens(two)
    assert choices(two) - choices(spread) == routed // 2


def test_kernels_are_asked_for_the_heads_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = GlmFlashModel.choose_kernels

    def choose(model: GlmFlashModel, *args: Any, **others: Any) -> Any:
        asked.append((model.kda_heads, model.n_heads))
        return original(model, *args, **others)

    monkeypatch.setattr(GlmFlashModel, "choose_kernels", choose)
    Ready(RECIPES / "quickstart.yaml", [f"{DEGREE}=2", "hardware.ranks=2"], None, anywhere=True)
    assert set(asked) == {(2, 2)}


@pytest.mark.parametrize(
    ("part", "length", "padding", "real"),
    [(None, 6, 1, 5), ((0, 2), 3, 1, 3), ((1, 2), 3, 1, 2), ((1, 4), 1, 3, 0), ((0, 4), 1, 3, 1)],
)
def test_padding_is_routed_and_not_counted(
    part: tuple[int, int] | None, length: int, padding: int, real: int
) -> None:
    torch.manual_seed(0)
    moe = tiny_glm().build_spec().model.layers[3].moe.build()
    moe.init_states()
    moe._part = part
    x = torch.randn(1, length, 128)
    out = moe(x, padding)
    assert out.shape == x.shape
    counts = moe.tokens_per_expert_E.clone()
    assert counts.sum() == 2 * real
    moe.tokens_per_expert_E.zero_()
    if real:
        moe(x[:, :real])
    assert torch.equal(moe.tokens_per_expert_E, counts)
    moe.eval()(x, padding)
    assert torch.equal(moe.tokens_per_expert_E, counts)


def test_a_context_split_is_sized_by_the_heads_of_one_rank() -> None:
    from components.context_parallel.families import split_of

    on = ["components.context_parallel.enabled=true", "parallelism.context_parallel_degree=2"]
    one, two = (split_of(recipe(*on, f"{DEGREE}={n}")) for n in (1, 2))
    assert one.tokens == two.tokens
    assert two.model.kda_heads == one.model.kda_heads // 2
    # Hidden states are gathered whole; outputs of half the heads return.
    assert one.volume("kda")[0] > two.volume("kda")[0] > one.volume("kda")[0] / 2
    assert one.volume("dsa") == two.volume("dsa")
    assert split_of(recipe(*on, f"{DEGREE}=4")).methods["kda"] == "state"
