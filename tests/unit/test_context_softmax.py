"""What the component context_parallel makes of models with softmax attention."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.context_parallel.checks import check_split
from components.context_parallel.collectives import Link
from components.context_parallel.component import ContextParallel
from components.context_parallel.families import split_of
from components.context_parallel.softmax.plan import SoftmaxSplit, usual_softmax
from components.core.base import Target
from components.core.sizes import local_tokens, mean_tokens
from components.models.library import TitanModel
from components.titan.build import prepare
from components.titan.cp_attention import SharedAttention, layer_shapes
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from launch.summary import summarise
from tests.unit.models_support import big_moe

DOUBLE, GPT_OSS = "moe_120b_512k_16xh200", "gpt_oss_120b_128k_16xh200"
SOFTMAX = "components.context_parallel.softmax"
ON_TWO = ["components.context_parallel.enabled=true", "parallelism.context_parallel_degree=2"]
MIB = 2**20
# Keys and values of a token: 8 heads of 128 each.
ROW = 2 * 8 * 128


def recipe(*overrides: str, name: str = DOUBLE) -> Any:
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides)).recipe


def split(*overrides: str, name: str = DOUBLE) -> SoftmaxSplit:
    found = split_of(recipe(*overrides, name=name))
    assert isinstance(found, SoftmaxSplit)
    return found


@pytest.mark.parametrize(
    ("ranks", "method"), [(2, "ulysses"), (8, "ulysses"), (14, "ulysses"), (16, "ring")]
)
def test_tokens_are_traded_for_heads_where_ranks_divide_them(ranks: int, method: str) -> None:
    shapes = layer_shapes(big_moe().build_spec().model, 1)
    assert {shape.heads.heads for shape in shapes} == {56}
    assert usual_softmax(shapes, ranks) == method


def test_tensor_ranks_share_heads_before_context_ranks_do() -> None:
    (shape,) = set(layer_shapes(big_moe().build_spec().model, 4))
    assert (shape.heads.heads, shape.heads.key_heads) == (14, 2)
    assert usual_softmax((shape,), 8) == "ring"


def test_layers_with_windows_are_a_kind_of_their_own() -> None:
    found = split(name=GPT_OSS)
    assert found.methods == {"window": "window", "softmax": "ulysses"}
    assert [found.layers(mixer) for mixer in ("softmax", "window")] == [18, 18]
    assert {shape.window for shape in found.shapes} == {128, None}
    assert all(shape.sinks for shape in found.shapes)
    assert split().methods == {"softmax": "double_ring"}


def test_parts_begin_anywhere_so_that_shares_are_equal() -> None:
    found = recipe()
    assert local_tokens(found) == mean_tokens(found) == 2**19 // 16
    layout = split().cut((3, 2**19 - 1000, 997))
    assert {layout.tokens_of(rank) for rank in range(16)} == {2**19 // 16}


def test_the_check_says_what_ranks_send_and_hold() -> None:
    text = summarise(recipe(), Target("cuda", 16, 139 * 2**30))
    tokens = 2**19 // 16
    # The rank that passes on most keeps to itself what comes last, one rank's rows.
    forward = 15 * tokens * ROW * 2 / MIB
    assert f"softmax double_ring: {forward:,.1f} MiB forward" in text
    assert "7 layers, context 16, zigzag" in text
    windows = summarise(recipe(name=GPT_OSS), Target("cuda", 16, 139 * 2**30))
    assert "traffic      window: " in windows and "traffic      softmax ulysses: " in windows
    # Three ranks' rows and six sums, gradients of queries; half of the layer's own come later.
    held = tokens * (ROW * (3 * 2 + 6 * 4) + 56 * 128 * 4 - (56 * 128 + ROW)) / 2**30
    assert f"{held:.2f} GiB per rank on the device: what a softmax layer exchanges" in text


def test_windows_are_all_that_their_layers_send() -> None:
    found = split(name=GPT_OSS)
    row = 2 * 8 * 64
    # Of a zigzag's two parts per rank: neighbours see 127 tokens of each, gradients come back.
    assert found.volume("window") == (2 * 127 * row * 2, 2 * 127 * row * (2 + 4))
    # Tokens for 64 heads, 8 key heads in two copies, outputs, and log-sum-exps for the sinks.
    tokens = 2**17 // 16
    both = tokens * ((64 * 64 + 2 * row + 64 * 64) * 2 + 64 * 4) * 15 // 16
    assert found.volume("softmax") == (both, both)


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        # Queries, keys and values in two copies, these again, and outputs twice.
        ("ulysses", (64 * 64 + 2 * 2 * 2 * 8 * 64 + 2 * 64 * 64) * 2),
        # Of 16 ranks but for half a rank's in bfloat16 twice and in float32, beside own twice;
        # own sums.
        ("all_gather", 2 * 8 * 64 * (15.5 * (2 * 2 + 4) + 16 * 2 * 2 + (4 - 2))),
        # Two ranks' rows and four sums, gradients of queries; half of the layer's own come later.
        ("ring", 2 * 8 * 64 * (2 * 2 + 4 * 4) + 64 * 64 * 4 - (64 * 64 + 2 * 8 * 64)),
    ],
)
def test_what_a_method_holds_is_counted(method: str, numbers: float) -> None:
    found = split(f"{SOFTMAX}={method}", name=GPT_OSS)
    tokens, row = 2**17 // 16, 2 * 8 * 64
    assert found.exchanged("softmax") == numbers * tokens
    # Two parts, before each 127 tokens: brought, beside a part's own with gradients, of one part
    # until they are sent. A part's gradients of queries, and wide sums.
    before = (2 + 2 + 1) * 127 * row * 2
    assert found.exchanged("window") == before + tokens * (row * 2 + 64 * 64 + row * (4 - 2))


def test_bytes_are_reported_by_layers_of_either_kind() -> None:
    component = ContextParallel(ContextParallel.Config(enabled=True))
    component.link = Link(SimpleNamespace())  # type: ignore[arg-type]
    component.plan = split(name=GPT_OSS)
    component.link.traffic.add("softmax.heads", "forward", 18 * 3 * MIB)
    component.link.traffic.add("softmax.lse", "forward", 18 * MIB)
    component.link.traffic.add("window.gradients", "backward", 18 * MIB)
    found = component.metrics(None)  # type: ignore[arg-type]
    assert found == {
        "context/softmax_forward_mib": 4.0,
        "context/softmax_backward_mib": 0.0,
        "context/window_forward_mib": 0.0,
        "context/window_backward_mib": 1.0,
    }
    assert found.keys() <= ContextParallel.scalars.keys()


def test_attention_is_replaced_and_its_kernels_are_not_announced(tmp_path: Path) -> None:
    # The replaced one would be "attention: sdpa (auto on cpu)".
    small = ["model=moe_debug", "components.precision_trimming.enabled=false"]
    for settings, announced in ((ON_TWO, False), ([], True)):
        found = recipe(*small, *settings, name="quickstart")
        run = prepare(found, tmp_path, "cpu", 2 if settings else 1)
        assert any("sdpa" in note for note in run.notes) == announced
        model: Any = run.config.model_spec.model  # type: ignore[union-attr]
        shared = [isinstance(layer.attention.inner_attention, SharedAttention.Config)
                  for layer in model.layers]  # fmt: skip
        assert shared == [not announced] * 2


def test_attention_without_key_heads_of_its_own_is_refused() -> None:
    found = recipe(*ON_TWO, "model=llama3_debug", name="quickstart")
    assert not list(check_split(found, Target("cpu", 2)))
    found.model = TitanModel(family="deepseek_v3", flavor="debugmodel")
    (problem,) = check_split(found, Target("cpu", 2))
    assert problem.path == "components.context_parallel.enabled"
    assert "(kda, dsa, softmax attention with key heads)" in problem.message


def test_distances_are_kept_by_the_component_alone() -> None:
    alibi = ["model=moe_debug", "model.position.kind=alibi"]
    assert not recipe(*alibi, *ON_TWO, name="quickstart").model.check_run(
        recipe(*alibi, *ON_TWO, name="quickstart")
    )
    stock = recipe(*alibi, ON_TWO[1], name="quickstart")
    ((key, message),) = stock.model.check_run(stock)
    assert key == "model.position.kind"
    assert "components.context_parallel.enabled=true" in message


def test_rows_of_a_batch_are_one_sequence_to_its_ranks() -> None:
    one, two = (split(f"training.local_batch_size={rows}") for rows in (1, 2))
    assert (one.tokens * one.ranks, two.tokens) == (512 * 1024, 2 * one.tokens)
    assert two.exchanged("softmax") == 2 * one.exchanged("softmax")
