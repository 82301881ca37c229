"""What the component context_parallel makes of a recipe, and how batches and losses reach it."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchtitan.components.validate
import torchtitan.trainer
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss

from components.context_parallel.checks import check_split
from components.context_parallel.collectives import Link
from components.context_parallel.component import ContextParallel
from components.context_parallel.families import split_of
from components.context_parallel.glm import alignment, usual_kda
from components.context_parallel.layout import KINDS, cut_batch, most_above_mean
from components.context_parallel.mixers import MIXERS
from components.core.base import Target
from components.core.registry import component_types
from components.core.sizes import local_tokens, mean_tokens
from components.models.glm_flash.documents import Documents
from components.offload.layout import units_of
from components.titan.context_parallel import batches_cut_by
from components.titan.padded_loss import PaddedChunkedLoss
from components.titan.rank_loss import RankLoss
from launch.config.groups import RECIPES
from launch.config.load import load_recipe
from launch.summary import summarise
from tests.unit.chunked_support import build
from tests.unit.models_support import tiny_glm

LONG = "glm_flash_1m_64xh200"
ON_TWO = ["components.context_parallel.enabled=true", "parallelism.context_parallel_degree=2"]


def recipe(*overrides: str, name: str = LONG) -> Any:
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides)).recipe


@pytest.mark.parametrize(
    ("heads", "ranks", "method"),
    [(64, 2, "hidden"), (64, 4, "hidden"), (64, 3, "state"), (64, 8, "state"), (6, 3, "hidden")],
)
def test_kda_exchanges_hidden_states_for_few_ranks_that_share_the_heads(
    heads: int, ranks: int, method: str
) -> None:
    assert usual_kda(tiny_glm(kda_heads=heads), ranks) == method


@pytest.mark.parametrize(
    ("pool", "reach", "align"), [(4, 4, 4), (4, 5, 4), (4, 6, 8), (8, 4, 8), (2, 9, 8)]
)
def test_parts_hold_whole_pools_and_what_a_convolution_sees(
    pool: int, reach: int, align: int
) -> None:
    model = tiny_glm(index_kpool=pool, conv_kernel=reach, index_topk=64)
    assert alignment(model) == align


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_has_more_tokens_than_memory_is_counted_for(kind: Any) -> None:
    draw, most = random.Random(3), 0
    for _ in range(300):
        ranks, align = draw.choice([2, 3, 4, 8]), draw.choice([4, 8])
        lengths = [draw.choice([1, 3, 7, 50, 301]) for _ in range(20)]
        lengths += [ranks * 2 * align - sum(lengths) % (ranks * 2 * align)]
        layout = cut_batch((*lengths, 1024 * ranks), ranks, kind, align)
        above = max(map(layout.tokens_of, range(ranks))) - layout.tokens // ranks
        assert above <= most_above_mean(kind, align)
        most = max(most, above)
    # The bound is not idle.
    assert most >= 4


def test_the_offload_of_a_layer_input_has_room_for_the_largest_share() -> None:
    found = recipe()
    assert local_tokens(found) == mean_tokens(found) + 8 == 2**20 // 32 + 8
    assert units_of(found)[0].boundary == local_tokens(found) * 4 * 4096 * 2
    contiguous = recipe("components.context_parallel.layout=contiguous")
    assert local_tokens(contiguous) == mean_tokens(found) + 4
    alone = recipe(name="quickstart")
    assert local_tokens(alone) == mean_tokens(alone)


def test_every_mixer_of_the_model_gets_the_method_that_was_asked_for() -> None:
    assert split_of(recipe()).methods == {"kda": "state", "dsa": "gathered"}
    asked = recipe("components.context_parallel.kda=projections")
    assert split_of(asked).methods["kda"] == "projections"
    for mixer, method in split_of(asked).methods.items():
        assert method in MIXERS[mixer].methods


def test_the_check_says_what_ranks_send_and_hold() -> None:
    text = summarise(recipe(), Target("cuda", 64, 139 * 2**30))
    # 63 states of two parts: 64 heads of 128 x 256 in float32 each, to 31 ranks.
    assert f"kda state: {2 * 31 * 64 * 128 * 256 * 4 / 2**20:,.1f} MiB forward" in text
    # 1,088 bytes of latents and pooled keys for each token, to 31 ranks.
    assert f"dsa gathered: {1088 * 32768 * 31 / 2**20:,.1f} MiB forward" in text
    assert "what a dsa layer exchanges with context ranks" in text
    # Latents of 1M tokens as they arrived, in order and in float32, their gradients; index keys.
    held = split_of(recipe()).exchanged("dsa")
    assert held == 2**20 * (512 * (2 * 2 + 3 * 4) + 128 // 4 * 2 * 2)
    assert "traffic" not in summarise(recipe(name="quickstart"), Target("cpu", 1))


def test_hidden_states_and_projections_are_counted_by_their_widths() -> None:
    for kda in ("hidden", "projections"):
        settings = [f"components.context_parallel.kda={kda}"]
        split = split_of(recipe(*settings, name="glm_flash_128k_64xh200"))
        tokens, width = 32768, 64 * 128
        wanted = {
            "hidden": 4 * tokens * (4096 * (2 + 8) + (128 + 64) * 2),
            "projections": 3 * tokens * (4 * width + 64) * 2,
        }
        assert split.exchanged("kda") == wanted[kda]


def test_the_decoder_gives_mixers_what_it_is_given_for_them() -> None:
    torch.manual_seed(0)
    model = build(tiny_glm(n_layers=2, layer_types=["kda", "dsa"]).build_spec().model)
    tokens = torch.randint(320, (1, 24))
    documents = Documents.from_lengths((9, 15))
    positions = documents.position.unsqueeze(0)
    with torch.no_grad():
        wanted = model(tokens, positions)
        assert torch.equal(model(tokens, positions.flip(1), documents), wanted)
        assert not torch.equal(model(tokens, positions.flip(1)), wanted)


def test_the_trainer_and_the_validator_cut_by_our_function_while_it_is_installed() -> None:
    users = torchtitan.trainer, torchtitan.components.validate
    stock = [user.prepare_context_parallel_input for user in users]

    def cut(tokens: Any, labels: Any, extra: Any) -> Any:
        return tokens + 1, labels, {**extra, "cut": True}

    with pytest.raises(RuntimeError, match="ends"), batches_cut_by(cut):
        for user in users:
            found = user.prepare_context_parallel_input(
                torch.zeros(1), torch.zeros(1), {"positions": 0}, None, "cpu", "headtail", None
            )
            assert found == (torch.ones(1), torch.zeros(1), {"positions": 0, "cut": True})
        raise RuntimeError("the run ends")
    assert [user.prepare_context_parallel_input for user in users] == stock


@pytest.mark.parametrize("tokens", [12, 13, 3])
def test_a_chunked_loss_of_any_number_of_tokens_is_the_whole_one(tokens: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 20, bias=False)
    loss = PaddedChunkedLoss.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config()).build()
    loss.set_lm_head(head)
    hidden = torch.randn(1, tokens, 8, requires_grad=True)
    labels = torch.randint(20, (1, tokens))
    labels[0, 1] = IGNORE_INDEX
    count = torch.tensor(tokens - 1)
    whole = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum") / count
    wanted = torch.autograd.grad(whole, [hidden, head.weight])
    found, _ = loss(hidden, labels, count, positions=torch.arange(tokens).unsqueeze(0))
    found.backward()
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(hidden.grad, wanted[0])
    torch.testing.assert_close(head.weight.grad, wanted[1])


def test_a_ranks_mean_loss_is_over_the_tokens_that_it_computed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        kept = RankLoss()
        for _ in range(2):
            kept.begin()
            # 3 and 1 of 10 valid tokens; sums of losses 6 and 4.
            for valid, total in ((3, 6.0), (1, 4.0)):
                kept.count(torch.tensor([[1] * valid + [IGNORE_INDEX] * 2]))
                kept.add(torch.tensor(total / 10), torch.tensor(10))
            assert kept.largest(mesh) == pytest.approx(10 / 4)
        kept.begin()
        kept.count(torch.full((1, 3), IGNORE_INDEX))
        kept.add(torch.tensor(0.0), torch.tensor(10))
        assert kept.largest(mesh) == 0
    finally:
        dist.destroy_process_group()


# So that no component refuses a small run for having one chunk.
CHUNKS = [f"components.{name}.chunk_tokens=256"
          for name in ("pipelined_llep", "sequence_chunked_moe", "sublayer_chunking")]  # fmt: skip


def verdicts(model: str) -> dict[str, tuple[str, list[str]]]:
    """Component -> what becomes of it beside the component, and the keys that say so."""
    alone = ["components.chunked_loss.enabled=false", "components.precision_trimming.enabled=false"]
    experts = "parallelism.expert_parallel_degree=2"
    found = recipe(*ON_TWO, experts, *alone, *CHUNKS, f"model={model}", name="quickstart")
    target, said = Target("cpu", 2), {}
    assert not list(check_split(found, target))
    for name, kind in component_types().items():
        if name == "context_parallel":
            continue
        settings = getattr(found.components, name)
        settings.enabled = True
        refused = [problem.path for problem in check_split(found, target)]
        absent = [problem.path for problem in kind(settings).check(found, target)]
        settings.enabled = False
        assert all(path.startswith(f"components.{name}.") for path in refused)
        if refused:
            keys = [path.removeprefix("components.").removesuffix(".enabled") for path in refused]
            said[name] = "refused", keys
        else:
            assert absent in ([], [f"components.{name}.enabled"])
            said[name] = "no such part" if absent else "combine", [name]
    return said


def test_the_table_of_what_combines_is_what_the_checks_say() -> None:
    """Validators are asked about every other component; the README prints what they answer."""
    glm, softmax = verdicts("glm_flash_tiny"), verdicts("moe_debug")
    rows: dict[tuple[str, str], list[str]] = {}
    for name, (said, keys) in glm.items():
        rows.setdefault((said, softmax[name][0]), []).extend(keys)
    text = (RECIPES.parent / "README.md").read_text()
    table = text.split("| beside `context_parallel` ")[1].split("\n\n")[0].splitlines()[2:]
    assert sorted(table) == sorted(
        f"| {', '.join(f'`{key}`' for key in keys)} | {one} | {other} |"
        for (one, other), keys in rows.items()
    )


def test_bytes_are_reported_by_layer() -> None:
    component = ContextParallel(ContextParallel.Config(enabled=True))
    component.link = Link(SimpleNamespace())  # type: ignore[arg-type]
    component.plan = split_of(recipe())
    component.link.traffic.add("kda.states", "forward", 34 * 3 * 2**20)
    component.link.traffic.add("kda.halo", "forward", 34 * 2**20)
    component.link.traffic.add("dsa.latent", "backward", 11 * 2**20)
    trainer: Any = None
    assert component.metrics(trainer) == {
        "context/kda_forward_mib": 4.0,
        "context/kda_backward_mib": 0.0,
        "context/dsa_forward_mib": 0.0,
        "context/dsa_backward_mib": 1.0,
    }
    component.before_step(trainer)
    assert not any(component.metrics(trainer).values())
