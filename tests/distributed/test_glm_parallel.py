"""Two ranks train GLM-5.3-Flash as one rank does: loss, every gradient, every routing bias."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Module
from torchtitan.components.loss import IGNORE_INDEX

from components.titan.trainer import RecipeTrainer
from kernels.backends.ops import HYPER_CONNECTIONS
from tests.distributed.spawn import run_ranks
from tests.distributed.tensor_traffic import OUTSIDE, Sent, TensorTraffic, whole_on_every_rank
from tests.training import full, losses, metrics, small_overrides, train, write_corpus

pytestmark = pytest.mark.distributed

# Two micro-batches of two samples per step on two ranks: the same eight samples as one rank's step.
GLOBAL_BATCH = 8
LAYOUTS = {
    "fsdp2": ["parallelism.expert_parallel_degree=1"],
    "fsdp2_ep2": ["parallelism.expert_parallel_degree=2"],
    "tensor2": [
        "parallelism.tensor_parallel_degree=2",
        "components.indexer_sharding.enabled=true",
        # Their definition: ranks have no GPU.
        "model.hyper_connections_kernel=auto",
    ],
    "fsdp2_ep2_recompute": [
        "parallelism.expert_parallel_degree=2",
        "components.full_recompute.enabled=true",
    ],
    "fsdp2_ep2_trimmed": [
        "parallelism.expert_parallel_degree=2",
        "components.precision_trimming.enabled=true",
    ],
    "fsdp2_ep2_experts_in_chunks": [
        "parallelism.expert_parallel_degree=2",
        "components.layer_recompute.enabled=true",
        "components.precision_trimming.enabled=true",
        "components.sequence_chunked_moe.enabled=true",
        "components.sequence_chunked_moe.chunk_tokens=100",
        # Their definition: ranks have no GPU.
        "model.hyper_connections_kernel=auto",
    ],
}
QUICK = ("fsdp2", "tensor2", "fsdp2_ep2_experts_in_chunks")
PLANNED = {
    "fsdp2_ep2_planned": [
        "parallelism.expert_parallel_degree=2",
        "components.layer_recompute.enabled=true",
        "components.precision_trimming.enabled=true",
        "components.selective_checkpoint_offload.enabled=true",
        "components.pipelined_llep.enabled=true",
        "components.pipelined_llep.chunk_tokens=100",
        "components.pipelined_llep.minimum_rows=1",
    ],
}
INDEXERS = ["components.indexer_training.enabled=true", "metrics.expert_load=true"]
WITH_INDEXERS = {"fsdp2_ep2_indexers": ["parallelism.expert_parallel_degree=2", *INDEXERS]}
EXPERTS = 8
EXPERTS_OF_RANK_1 = slice(EXPERTS // 2, EXPERTS)


def model_overrides(corpus: Path) -> list[str]:
    """The tiny model with little text; documents above 19 tokens select 4 of their pools."""
    small = [o for o in small_overrides(corpus) if not o.startswith("model=")]
    return ["model=glm_flash_tiny", "model.index_topk=16", *small]


def overrides(corpus: str, seed: str) -> list[str]:
    return [
        *model_overrides(Path(corpus)),
        f"training.global_batch_size={GLOBAL_BATCH}",
        "training.steps=3",
        # Gradients are compared as they are, and small differences must not be scaled up.
        "training.max_norm=1000000.0",
        f"checkpoint.initial_load_path={seed}",
        "checkpoint.initial_load_model_only=true",
    ]


def randomise(model: Module, starve_rank_1: bool) -> None:
    """Move every parameter off its neutral initial value.

    Args:
        starve_rank_1: give the first half of the experts a bias that no score outweighs.
    """
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias_E"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
                buffer[: EXPERTS // 2] += 10.0 if starve_rank_1 else 0.0


def train_and_keep(trainer: RecipeTrainer) -> dict[str, Any]:
    """Train to the end.

    Returns:
        The first step's gradients, whole, by parameter name; the routing biases after each step, by
        step and name; parameters without a gradient; tokens that this rank's experts received.
    """
    model, original = trainer.model_parts[0], trainer.train_step
    kept: dict[str, Any] = {"gradients": {}, "biases": {}, "without": [], "received": []}
    for module in model.modules():
        if hasattr(module, "w1_EFD"):
            module.register_forward_pre_hook(
                lambda module, args: kept["received"].append(args[0].shape[0])
            )

    def clean(named: Iterator) -> Iterator:
        """Without what a recomputed layer's wrapper adds to names."""
        return ((name.replace("_checkpoint_wrapped_module.", ""), value) for name, value in named)

    def step(iterator: Iterator) -> None:
        original(iterator)
        if trainer.step == 1:
            for name, parameter in clean(model.named_parameters()):
                if parameter.grad is None:
                    kept["without"].append(name)
                else:
                    kept["gradients"][name] = full(parameter.grad)
        for name, buffer in clean(model.named_buffers()):
            if name.endswith("expert_bias_E"):
                kept["biases"][trainer.step, name] = full(buffer)

    trainer.train_step = step
    trainer.train()
    return kept


def train_and_count(trainer: RecipeTrainer) -> dict[str, Any]:
    """The same; what tensor ranks sent in the first step; and what weights all of them have."""
    whole: Counter[str] = Counter()
    step, traffic = trainer.train_step, TensorTraffic(trainer)

    def counted(iterator: Iterator) -> None:
        with nullcontext() if whole else traffic:
            step(iterator)
        whole.update({} if whole else whole_on_every_rank(trainer))

    trainer.train_step = counted
    return {**train_and_keep(trainer), "sent": traffic.sent, "whole": whole}


def train_layout(name: str, layout: str, corpus: str, seed: str, out: str) -> None:
    """One rank of a layout's run."""
    able = replace(HYPER_CONNECTIONS.backends["triton"], why_not=lambda device, shape: None)
    HYPER_CONNECTIONS.add(able)
    settings = [*overrides(corpus, seed), *(LAYOUTS | PLANNED | WITH_INDEXERS)[layout]]
    use = train_and_count if layout == "tensor2" else train_and_keep
    kept = train(Path(out) / name, settings, use=use)
    torch.save(kept, Path(out) / f"{name}.{os.environ['RANK']}.pt")


def single_run(out: Path, starve_rank_1: bool, settings: Sequence[str] = ()) -> Path:
    """A seed checkpoint, and one rank trained from it, with further ``settings``."""
    corpus = write_corpus(out / "corpus")

    def save(trainer: RecipeTrainer) -> None:
        randomise(trainer.model_parts[0], starve_rank_1)
        trainer.save_seed()

    seeding = [*model_overrides(corpus), "checkpoint.create_seed_checkpoint=true"]
    train(out / "seed", seeding, use=save)
    settings = [*overrides(str(corpus), str(out / "seed/checkpoint/step-0")), *settings]
    torch.save(train(out / "single", settings, use=train_and_keep), out / "single.pt")
    return out


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return single_run(tmp_path_factory.mktemp("glm"), starve_rank_1=False)


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return single_run(tmp_path_factory.mktemp("glm_starved"), starve_rank_1=True)


def two_ranks(folder: Path, layout: str) -> list[dict[str, Any]]:
    """Train a layout from the folder's seed; what each rank kept."""
    seed = str(folder / "seed/checkpoint/step-0")
    arguments = layout, layout, str(folder / "corpus"), seed, str(folder)
    run_ranks(train_layout, 2, folder / f"{layout}_errors", *arguments)
    return [torch.load(folder / f"{layout}.{rank}.pt") for rank in range(2)]


def assert_as_one(folder: Path, layout: str, ranks: list[dict[str, Any]]) -> None:
    """Losses, gradients and biases of both ranks are those of the single rank."""
    several, one = losses(folder / layout), losses(folder / "single")
    assert several[0] == pytest.approx(one[0], rel=1e-6)
    # Later steps follow AdamW's, which makes a full step of any gradient, however small.
    assert several == pytest.approx(one, rel=1e-3)
    expected = torch.load(folder / "single.pt")
    for rank in ranks:
        assert rank["without"] == expected["without"]
        assert rank["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            error = (rank["gradients"][name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
            assert error < 1e-4, f"{name}: {error:.2e}"
        assert rank["biases"].keys() == expected["biases"].keys()
        for key, bias in expected["biases"].items():
            assert torch.equal(rank["biases"][key], bias), key


def test_ranks_hold_different_numbers_of_valid_tokens(single: Path) -> None:
    counts = train(
        single / "counts",
        model_overrides(single / "corpus"),
        use=lambda trainer: [
            int((labels != IGNORE_INDEX).sum())
            for _, (_, labels) in zip(range(4), trainer.dataloader, strict=False)
        ],
    )
    assert len(set(counts)) > 1


def test_one_rank_trains_all_but_the_indexer_and_moves_every_bias(single: Path) -> None:
    """What keeps the comparisons below from comparing nothing."""
    kept = torch.load(single / "single.pt")
    assert len(kept["without"]) == 7
    assert all(".indexer." in name for name in kept["without"])
    assert all(gradient.norm() > 0 for gradient in kept["gradients"].values())
    seed_layers = {name for _, name in kept["biases"]}
    assert len(seed_layers) == 3
    for name in seed_layers:
        first, last = kept["biases"][1, name], kept["biases"][3, name]
        assert not torch.equal(first, last)


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in LAYOUTS]
)
def test_losses_gradients_and_biases_equal_one_rank(layout: str, single: Path) -> None:
    ranks = two_ranks(single, layout)
    assert_as_one(single, layout, ranks)
    for rank in ranks if layout == "tensor2" else []:
        assert_traffic(rank["sent"], rank["whole"])


def assert_traffic(sent: Sent, whole: Counter[str]) -> None:
    """Elements that a rank sends, as the README gives them for each layer and direction."""
    passes, tokens, width, topk, pool = GLOBAL_BATCH // 2, 2 * 128, 128, 16, 4
    share = tokens * width // 2 * passes
    expected: Sent = Counter()
    assert len(whole) == 4 and min(whole.values()) > 16 * 1024
    for layer in ("0", "1", "2", "3"):
        # Routed experts and the shared one read one input; what they return is summed apart.
        outputs = 2 if layer == "0" else 3
        expected[layer, "forward", "gathered"] = expected[layer, "backward", "scattered"] = (
            2 * share
        )
        expected[layer, "forward", "scattered"] = outputs * share
        expected[layer, "backward", "gathered"] = outputs * share
        expected[layer, "backward", "summed"] = whole[layer] * passes
    # One block of queries, which one rank scores: its ids travel, and as much padding.
    expected["3", "forward", "pools"] = tokens * topk // pool * passes
    for what in ("gathered", "scattered"):
        found = sum(sent[OUTSIDE, way, what] for way in ("forward", "backward"))
        assert found == 2 * share, "one of the embedding, one of the head"
    assert {key: n for key, n in sent.items() if key[0] != OUTSIDE} == expected


def test_a_rank_whose_experts_get_no_token_still_joins_and_counts(starved: Path) -> None:
    ranks = two_ranks(starved, "fsdp2_ep2")
    assert all(tokens > 0 for tokens in ranks[0]["received"])
    assert set(ranks[1]["received"]) == {0}
    for name, gradient in ranks[1]["gradients"].items():
        if "inner_experts" in name:
            assert not gradient[EXPERTS_OF_RANK_1].any()
            assert gradient[: EXPERTS_OF_RANK_1.start].any()
    assert_as_one(starved, "fsdp2_ep2", ranks)


@pytest.mark.slow
def test_planned_experts_equal_one_rank(single: Path) -> None:
    assert_as_one(single, "fsdp2_ep2_planned", two_ranks(single, "fsdp2_ep2_planned"))


def test_a_rank_whose_experts_get_no_token_computes_half_of_the_others(starved: Path) -> None:
    assert_as_one(starved, "fsdp2_ep2_planned", two_ranks(starved, "fsdp2_ep2_planned"))
    for step in metrics(starved / "fsdp2_ep2_planned"):
        assert (step["llep/rank_load"], step["llep/planned_rank_load"]) == (2, 1)
        # Outputs of the experts wait on the host too, as planned to the byte.
        assert step["offload/sent_gib"] == 2 * step["offload/payload_gib"]


def test_indexer_training_and_expert_load_on_two_ranks_equal_one(single: Path) -> None:
    """The loss is summed over the queries of all ranks, and so are the tokens of an expert."""
    seed = str(single / "seed/checkpoint/step-0")
    settings = [*overrides(str(single / "corpus"), seed), *INDEXERS]
    one = train(single / "one_indexers", settings, use=train_and_keep)
    assert one["without"] == []
    for rank in two_ranks(single, "fsdp2_ep2_indexers"):
        for name, gradient in one["gradients"].items():
            error = (rank["gradients"][name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
            assert error < 1e-4, f"{name}: {error:.2e}"
    folders = single / "one_indexers", single / "fsdp2_ep2_indexers"
    found = [[m["indexer/kl"] for m in metrics(f) if "indexer/kl" in m] for f in folders]
    assert found[0][0] > 0
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    loads = [(f / "expert_load.jsonl").read_text().splitlines()[0] for f in folders]
    assert json.loads(loads[0]) == json.loads(loads[1])
