"""The component on one rank: what it refuses, what it says of memory, and whole runs with it."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import TrainingConfig

from components.core.base import MemoryTerm, Target
from components.core.registry import loss_term
from components.titan.build import prepare
from components.titan.head import RingHead, keep_head_sharded, rings_of
from components.titan.ring_loss import RingLoss
from components.titan.trainer import RecipeTrainer
from launch.config.load import load_recipe
from tests.training import full, losses, metrics, small_overrides, train, write_corpus
from tests.unit.config_support import (
    STEADY,
    Mistake,
    answer_to,
    assert_answers,
    corpus,
    write_recipe,
)

ON = ["components.chunked_loss.enabled=false", "components.ring_dtp.enabled=true"]
CPU = torch.device("cpu")
MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize("mistake", corpus("ring_dtp"), ids=lambda mistake: mistake.name)
def test_a_setting_that_cannot_work_is_refused(mistake: Mistake, tmp_path: Path) -> None:
    overrides = mistake.given.removesuffix("\n").split("\n")
    assert_answers(answer_to(write_recipe(tmp_path, STEADY), overrides), mistake.says)


def term(folder: Path, ranks: int, *overrides: str) -> MemoryTerm:
    """What the loss needs. 4,096 tokens of a rank, 64 wide in bfloat16, 320 vocabulary entries."""
    settings = [f"hardware.ranks={ranks}", *ON, *overrides]
    recipe = load_recipe(write_recipe(folder, STEADY), settings).recipe
    return loss_term(recipe, Target("cuda", ranks))


def test_memory_of_one_rank_is_a_strip_a_copy_of_the_head_and_hidden_states(
    tmp_path: Path,
) -> None:
    found = term(tmp_path, 1, "components.ring_dtp.strip_rows=1024")
    assert "logits" in found.name and found.where == "device"
    strip, head = 1024 * 320 * 2, 320 * 64 * 2
    assert found.nbytes == strip + head + (4096 + 2 * 1024) * 64 * 2


def test_memory_of_a_ring_has_its_part_of_the_vocabulary(tmp_path: Path) -> None:
    found = term(tmp_path, 4, "components.ring_dtp.strip_rows=1k")
    # Rows of 80 logits are 160 bytes, stored as 256.
    strip, head = 1024 * 256, 80 * 64 * 2
    gathered, parts = 2 * 1024 * 64 * 2, 1024 * 64 * 4 * 6 // 4
    assert found.nbytes == strip + head + gathered + parts + 4096 * 64 * 2


def test_memory_of_context_ranks_has_a_ring_of_all_and_half_the_tokens(tmp_path: Path) -> None:
    rows = "components.ring_dtp.strip_rows=1024"
    context = term(tmp_path, 4, rows, "parallelism.context_parallel_degree=2").nbytes
    assert term(tmp_path, 4, rows).nbytes - context == 2048 * 64 * 2


def test_memory_of_small_rings_has_the_gradient_before_it_is_summed(tmp_path: Path) -> None:
    rows = "components.ring_dtp.strip_rows=1024"
    ring = term(tmp_path, 4, rows, "components.ring_dtp.degree=2").nbytes
    whole = term(tmp_path, 2, rows).nbytes
    assert ring - whole == (160 + 80) * 64 * 4


def test_memory_of_replicas_has_the_gradient_before_it_is_summed(tmp_path: Path) -> None:
    replicas = term(tmp_path, 4, "parallelism.data_parallel_replicate_degree=2").nbytes
    assert replicas - term(tmp_path, 2).nbytes == 160 * 64 * 4


def test_memory_in_float32_has_no_copy_of_the_head(tmp_path: Path) -> None:
    found = term(tmp_path, 1, "training.mixed_precision_param=float32")
    assert found.nbytes == 4096 * (320 + 3 * 64) * 4


def test_memory_beside_host_optimizer_state_has_no_copy_of_the_head(tmp_path: Path) -> None:
    streamed = term(tmp_path, 1, "components.offload_stream_adamw.enabled=true").nbytes
    assert term(tmp_path, 1).nbytes - streamed == 320 * 64 * 2


def test_memory_of_travelling_weights_grows_with_the_vocabulary(tmp_path: Path) -> None:
    moving = "components.ring_dtp.schedule=move_weights"
    small = term(tmp_path, 4, moving).nbytes
    large = term(tmp_path, 4, moving, "model.vocab_size=640").nbytes
    # A strip of 4,096 x (160 - 80) bfloat16 logits, and per row of the head three bfloat16
    # (own, two on the way) and three float32 (gradients on the way).
    strip = 4096 * (384 - 256)
    assert large - small == strip + 80 * 64 * (3 * 2 + 3 * 4)


def test_memory_of_travelling_tokens_grows_with_the_tokens(tmp_path: Path) -> None:
    moving = ["components.ring_dtp.schedule=move_activations", "components.ring_dtp.strip_rows=512"]
    small = term(tmp_path, 4, *moving).nbytes
    large = term(tmp_path, 4, *moving, "training.local_batch_size=4").nbytes
    # Own, compacted and two on the way; three gradients on the way; statistics of four ranks.
    assert large - small == 4096 * (64 * (4 * 2 + 3 * 4) + 48 * 4)


def test_the_loss_of_other_recipes_is_whole_logits(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, STEADY), []).recipe
    assert loss_term(recipe, Target("cuda", 1)).nbytes == 2 * 2048 // 8 * 320 * (2 + 8)


def head_of(weight: torch.Tensor) -> tuple[nn.Linear, RingHead]:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    head.weight = nn.Parameter(weight)
    return head, RingHead(head, rings_of(head.weight, None, MINUTE))


def test_one_rank_computes_with_the_weight_itself_and_adds_to_its_gradient() -> None:
    head, ring_head = head_of(torch.randn(5, 3))
    assert ring_head.shard(torch.float32, CPU).data_ptr() == head.weight.data_ptr()
    seen = []
    for _ in range(2):
        with ring_head.gradient(CPU) as dw:
            assert dw is not None
            dw += 1
            seen.append(dw.data_ptr())
    assert head.weight.grad is not None
    assert seen == [head.weight.grad.data_ptr()] * 2
    assert torch.equal(head.weight.grad, torch.full((5, 3), 2.0))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_gradients_of_a_low_precision_weight_are_in_the_dtype_it_asks_for(
    kept: torch.dtype,
) -> None:
    head, ring_head = head_of(torch.randn(5, 3, dtype=torch.bfloat16))
    head.weight.grad_dtype = kept
    for _ in range(2):
        with ring_head.gradient(CPU) as dw:
            assert dw is not None and dw.dtype == torch.float32
            # 256 + 1 has no bfloat16.
            dw += 257
    assert head.weight.grad is not None and head.weight.grad.dtype == kept
    expected = torch.tensor(257.0).to(kept) * 2
    assert torch.equal(head.weight.grad, expected.expand(5, 3))


def test_a_failed_pass_leaves_the_gradient_of_a_low_precision_weight() -> None:
    head, ring_head = head_of(torch.randn(5, 3, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="out of memory"), ring_head.gradient(CPU) as dw:
        assert dw is not None
        dw += 1
        raise RuntimeError("out of memory")
    assert head.weight.grad is None


def test_a_head_with_a_bias_is_refused() -> None:
    model = nn.Module()
    model.lm_head = nn.Linear(3, 5)
    with pytest.raises(ValueError, match="components.ring_dtp.enabled: true .* bias"):
        keep_head_sharded(lambda model, **unused: model)(model, training=TrainingConfig())


@pytest.fixture
def four_ranks() -> Iterator[DeviceMesh]:
    """The first of four ranks that share the model; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    dist.destroy_process_group()


@pytest.mark.parametrize("trained", [True, False])
def test_a_head_is_trained_or_frozen_as_it_was_before_it_was_cut(
    four_ranks: DeviceMesh, trained: bool
) -> None:
    model = nn.Module()
    model.lm_head = nn.Linear(3, 8, bias=False).requires_grad_(trained)
    model.norm = nn.Linear(3, 4)

    def parallelize(model: nn.Module, *, training: TrainingConfig) -> nn.Module:
        return fully_shard(model, mesh=four_ranks)

    keep_head_sharded(parallelize)(model, training=TrainingConfig())
    assert isinstance(model.lm_head.weight, DTensor)
    assert model.lm_head.weight.requires_grad is trained


def test_groups_of_rings_have_the_timeout_of_the_recipe(
    four_ranks: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*ON, "components.ring_dtp.degree=2", "comm.init_timeout_seconds=17"]
    recipe = load_recipe(write_recipe(tmp_path, STEADY), settings).recipe
    config = prepare(recipe, tmp_path, "cpu", 4).config.loss
    assert isinstance(config, RingLoss.Config)
    asked = []

    def new(groups: list[list[int]], timeout: timedelta | None = None) -> tuple:
        asked.append((groups, timeout))
        return dist.group.WORLD, []

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", new)
    head = nn.Linear(3, 8, bias=False)
    whole = head.weight.detach()
    head.weight = nn.Parameter(distribute_tensor(whole, four_ranks, [Shard(0)], src_data_rank=None))
    RingLoss(config).set_lm_head(head)
    limit = timedelta(seconds=17)
    assert asked == [([[0, 1], [2, 3]], limit), ([[0, 2], [1, 3]], limit)]


def test_a_frozen_head_has_no_buffer() -> None:
    head, ring_head = head_of(torch.randn(5, 3))
    head.weight.requires_grad_(False)
    with ring_head.gradient(CPU) as dw:
        assert dw is None
    assert head.weight.grad is None


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two accumulation passes a step, a validation after the second; an odd vocabulary."""
    return [
        *small_overrides(write_corpus(tmp_path_factory.mktemp("ring") / "corpus")),
        "training.global_batch_size=4",
        "training.steps=2",
        "model.vocab_size=321",
        "validation.enabled=true",
        "validation.every=2",
        "validation.batches=2",
        "checkpoint.enable=false",
        "components.ring_dtp.strip_rows=100",
    ]


def validations(run_dir: Path) -> list[float]:
    return [line["validation/loss"] for line in metrics(run_dir) if "validation/loss" in line]


def test_training_and_validation_equal_torchtitans_loss(
    tmp_path: Path, overrides: list[str]
) -> None:
    train(tmp_path / "chunked", overrides)
    for schedule in ("auto", "move_weights"):
        chosen = f"components.ring_dtp.schedule={schedule}"
        train(tmp_path / schedule, [*overrides, *ON, chosen])
        assert losses(tmp_path / schedule) == pytest.approx(losses(tmp_path / "chunked"), rel=1e-5)
        found, expected = validations(tmp_path / schedule), validations(tmp_path / "chunked")
        assert len(found) == 2 and found == pytest.approx(expected, rel=1e-4)


def test_mixed_precision_computes_in_it_and_keeps_float32_gradients(
    tmp_path: Path, overrides: list[str]
) -> None:
    def use(trainer: RecipeTrainer) -> set[torch.dtype]:
        head = trainer.model_parts[0].lm_head
        seen: set[torch.dtype] = set()
        shard = trainer.loss_fn.head.shard

        def watched(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            seen.add(dtype)
            return shard(dtype, device)

        trainer.loss_fn.head.shard = watched
        trainer.loss_fn.head.gradient = Mock(side_effect=trainer.loss_fn.head.gradient)
        trainer.train()
        # Two passes of two steps; validation asks for no gradient.
        assert trainer.loss_fn.head.gradient.call_count == 4
        assert head.weight.dtype == head.weight.grad.dtype == torch.float32
        return seen

    low = [*overrides, "training.mixed_precision_param=bfloat16"]
    train(tmp_path / "chunked", low)
    assert train(tmp_path / "ring", [*low, *ON], use=use) == {torch.bfloat16}
    # torchtitan rounds logits and the head's gradient to bfloat16 (8 bits).
    assert losses(tmp_path / "ring") == pytest.approx(losses(tmp_path / "chunked"), rel=2e-3)


def test_optimizer_state_on_the_host_learns_the_same_to_the_bit(
    tmp_path: Path, overrides: list[str]
) -> None:
    """The head is then bfloat16 as well, and still has a float32 gradient."""

    def use(trainer: RecipeTrainer) -> torch.dtype:
        trainer.train()
        weight = trainer.model_parts[0].lm_head.weight
        assert weight.grad.dtype == torch.float32
        return weight.dtype

    settings = [*overrides, *ON, "training.mixed_precision_param=bfloat16"]
    assert train(tmp_path / "device", settings, use=use) == torch.float32
    streamed = [*settings, "components.offload_stream_adamw.enabled=true"]
    assert train(tmp_path / "host", streamed, use=use) == torch.bfloat16
    assert losses(tmp_path / "host") == losses(tmp_path / "device")
    assert validations(tmp_path / "host") == validations(tmp_path / "device")


def glm(overrides: list[str]) -> list[str]:
    kept = [o for o in overrides if not o.startswith(("model", "validation", "checkpoint.enable"))]
    return ["model=glm_flash_tiny", "model.index_topk=16", *kept, "validation.enabled=false"]


OFFLOADED = [
    "components.layer_recompute.enabled=true",
    "components.selective_checkpoint_offload.enabled=true",
]
WATCHED = ["debug.leak_guard=true", "debug.memory_timeline=2"]


@pytest.mark.parametrize("others", [OFFLOADED, pytest.param(WATCHED, marks=pytest.mark.slow)])
def test_glm_flash_trains_and_exports_beside_other_techniques(
    tmp_path: Path, overrides: list[str], others: list[str]
) -> None:
    """They look for layers and modules, and this model's head never runs."""
    export = ["checkpoint.last_save_in_hf=true", "checkpoint.last_save_model_only=true"]

    def trained_head(trainer: RecipeTrainer) -> torch.Tensor:
        trainer.train()
        return full(trainer.model_parts[0].lm_head.weight)

    train(tmp_path / "chunked", [*glm(overrides), "checkpoint.enable=false"])
    settings = [*glm(overrides), *ON, *export, *others]
    head = train(tmp_path / "ring", settings, use=trained_head)
    assert losses(tmp_path / "ring") == pytest.approx(losses(tmp_path / "chunked"), rel=1e-5)
    (file,) = (tmp_path / "ring/checkpoint/step-2").glob("*.safetensors")
    assert torch.equal(load_file(file)["lm_head.weight"], head)


def test_a_model_that_freezes_its_head_finds_it(tmp_path: Path, overrides: list[str]) -> None:
    only = [
        "components.indexer_training.enabled=true",
        "components.indexer_training.only=true",
        "checkpoint.enable=false",
    ]

    def use(trainer: RecipeTrainer) -> list[torch.Tensor]:
        weight = trainer.model_parts[0].lm_head.weight
        before = full(weight)
        trainer.train()
        assert not weight.requires_grad and weight.grad is None
        return [before, full(weight)]

    before, after = train(tmp_path / "ring", [*glm(overrides), *ON, *only], use=use)
    assert torch.equal(before, after)
    train(tmp_path / "chunked", [*glm(overrides), *only])
    assert losses(tmp_path / "ring") == pytest.approx(losses(tmp_path / "chunked"), rel=1e-5)
