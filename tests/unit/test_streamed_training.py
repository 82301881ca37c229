"""Training with AdamW's state on the host: weights, losses and checkpoints of the run without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchtitan.components.checkpointer import CheckpointManager

from components.core.shards import local_of
from components.offload.accountant import GIB, host_accountant
from components.offload.slabs import PAGE
from components.titan.streamed_optimizer import StreamedOptimizers
from components.titan.trainer import RecipeTrainer
from tests.training import (
    full,
    losses,
    metrics,
    train,
    write_corpus,
)
from tests.unit.streamed_runs import (
    GLM,
    NAME,
    ON,
    assert_same,
    assert_same_checkpoint,
    continued,
    settings,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("streamed") / "corpus")


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    yield
    assert NAME not in host_accountant().holdings


@pytest.fixture(scope="module")
def stock(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, a checkpoint every two."""
    run = tmp_path_factory.mktemp("stock")
    train(run, [*settings(corpus, 4), "checkpoint.interval=2"])
    return run


@pytest.mark.parametrize(
    "extra",
    [
        [f"{NAME}.bucket_parameters=20000"],
        [f"{NAME}.split=1"],
        [f"{NAME}.split=0.5", f"{NAME}.slots=3", f"{NAME}.bucket_parameters=5000"],
        [f"{NAME}.split=auto"],
    ],
    ids=["streamed", "by the CPU", "both", "measured"],
)
def test_losses_and_checkpoints_are_equal_to_the_bit(
    extra: list[str], corpus: Path, stock: Path, tmp_path: Path
) -> None:
    train(tmp_path, [*settings(corpus, 4), *ON, *extra])
    assert losses(tmp_path) == losses(stock)
    assert_same_checkpoint(tmp_path, stock, 4)


@pytest.mark.parametrize(
    "extra",
    [
        [*GLM, "training.steps=2"],
        [*GLM[:2], "training.steps=2"],
        ["training.mixed_precision_param=float32", "training.steps=2"],
        ["training.global_batch_size=3", "training.steps=2", "debug.leak_guard=true"],
        ["components.ring_dtp.enabled=true", "training.steps=2"],
    ],
    ids=["float32 modules", "frozen weights", "float32", "accumulation", "head outside of FSDP"],
)
def test_other_runs_are_equal_to_the_bit(extra: list[str], corpus: Path, tmp_path: Path) -> None:
    train(tmp_path / "off", [*settings(corpus), *extra])
    train(tmp_path / "on", [*settings(corpus), *extra, *ON])
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    assert_same_checkpoint(tmp_path / "on", tmp_path / "off", 2)


def test_only_what_computes_stays_on_the_device(corpus: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    def use(trainer: RecipeTrainer) -> None:
        trainer.train()
        (part,) = trainer.model_parts
        masters = trainer.optimizers.masters
        for name, weight in part.named_parameters():
            found[name] = weight.dtype
            if weight.grad is not None:
                assert weight.grad.dtype == torch.float32, name
                described = weight.grad.__tensor_flatten__()[1][1]
                assert described.dtype == torch.float32, name
            assert (weight in masters) == weight.requires_grad, name
            if weight.requires_grad:
                assert torch.equal(masters[weight].to(weight.dtype), weight), name

    train(tmp_path, [*settings(corpus, 2), *GLM, *ON], use=use)
    kept = {name for name, dtype in found.items() if dtype == torch.float32}
    assert {name.split(".")[2] for name in kept} == {"attention", "attention_hc", "ffn_hc"}
    assert "layers.0.attention_hc.affine.base" in kept
    assert "layers.0.attention.q_proj.weight" not in kept


def test_frozen_weights_stay_as_they_are(corpus: Path, tmp_path: Path) -> None:
    """In their dtype, without a master, and to the bit."""
    found: dict[str, Any] = {}

    def use(trainer: RecipeTrainer) -> None:
        (part,) = trainer.model_parts
        frozen = {n: w for n, w in part.named_parameters() if not w.requires_grad}
        before = {name: full(weight) for name, weight in frozen.items()}
        trainer.train()
        for name, weight in frozen.items():
            found[name] = weight.dtype
            assert weight not in trainer.optimizers.masters and weight.grad is None, name
            assert torch.equal(full(weight), before[name]), name

    train(tmp_path, [*settings(corpus, 1), *GLM[:2], *ON], use=use)
    assert found and set(found.values()) == {torch.float32}
    assert all("indexer" in name for name in found)


def storages(held: Any) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Of all tensors that an object keeps; modules and optimizers keep their own."""
    if isinstance(held, torch.Tensor):
        yield str(held.shape), local_of(held).untyped_storage()
    elif isinstance(held, dict):
        for each in held.values():
            yield from storages(each)
    elif isinstance(held, list | tuple):
        for each in held:
            yield from storages(each)
    elif not isinstance(held, torch.nn.Module | torch.optim.Optimizer | type(None) | str):
        yield from storages(vars(held))


def test_nothing_is_kept_for_checkpoints_but_what_is_there_anyway(
    corpus: Path, tmp_path: Path
) -> None:
    """A projection whose weights are taken apart in checkpoints is among what is trained."""

    def use(trainer: RecipeTrainer) -> None:
        trainer.train()
        (part,) = trainer.model_parts
        own = [*part.parameters(), *part.buffers(), *trainer.optimizers.masters.values()]
        places = {local_of(tensor).untyped_storage().data_ptr() for tensor in own}
        model = trainer.checkpointer.states["model"]
        assert {*model.state_dict()} - {name for name, _ in part.named_parameters()}
        found = list(storages(model))
        assert len(found) > 10
        for name, storage in found:
            assert not storage.nbytes() or storage.data_ptr() in places, name

    beside = ["checkpoint.interval=1", "checkpoint.async_mode=async"]
    train(tmp_path, [*settings(corpus, 2), *ON, *beside], use=use)


def test_resuming_twice_is_the_uninterrupted_run(corpus: Path, stock: Path, tmp_path: Path) -> None:
    for steps in (1, 3, 4):
        train(tmp_path, [*settings(corpus, steps), *ON])
    assert losses(tmp_path) == losses(stock)
    assert_same_checkpoint(tmp_path, stock, 4)


def test_going_back_in_the_same_process_is_exact(corpus: Path, stock: Path, tmp_path: Path) -> None:
    def use(trainer: RecipeTrainer) -> None:
        trainer.train()
        trainer.config.checkpoint.load_step = 2
        trainer.train()

    train(tmp_path, [*settings(corpus, 4), *ON, "checkpoint.interval=2"], use=use)
    assert losses(tmp_path) == losses(stock) + losses(stock)[2:]
    assert_same_checkpoint(tmp_path, stock, 4)


@pytest.mark.parametrize("first", [[], ON], ids=["to the host", "back to the device"])
def test_a_checkpoint_goes_on_in_a_run_of_the_other_kind(
    first: list[str], corpus: Path, stock: Path, tmp_path: Path
) -> None:
    source = stock
    if first:
        source = tmp_path / "first"
        train(source, [*settings(corpus, 2), *first])
    run = continued(source, 2, tmp_path / "second")
    train(run, [*settings(corpus, 4), *([] if first else ON)])
    assert losses(run) == losses(stock)[2:]
    assert_same_checkpoint(run, stock, 4)


def test_a_checkpoint_of_another_implementation_goes_on(
    corpus: Path, stock: Path, tmp_path: Path
) -> None:
    foreach = [*settings(corpus, 2), "optimizer.implementation=foreach"]
    train(tmp_path / "foreach", foreach)
    run = continued(tmp_path / "foreach", 2, tmp_path / "on")
    train(run, [*settings(corpus, 4), *ON])
    assert losses(run) == pytest.approx(losses(stock)[2:], rel=1e-5)


def test_weights_alone_start_a_run(corpus: Path, stock: Path, tmp_path: Path) -> None:
    start = [
        f"checkpoint.initial_load_path={stock}/checkpoint/step-2",
        "checkpoint.initial_load_model_only=true",
    ]
    for name, extra in (("off", []), ("on", ON)):
        train(tmp_path / name, [*settings(corpus, 2), *start, *extra])
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    assert_same_checkpoint(tmp_path / "on", tmp_path / "off", 2)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(GLM[:2], "bfloat16"), (["model=llama3_debug"], "float32")],
    ids=["glm", "llama"],
)
def test_exports_are_the_same_files_and_start_the_same_run(
    model: list[str], dtype: str, corpus: Path, tmp_path: Path
) -> None:
    export = [
        "checkpoint.last_save_in_hf=true",
        "checkpoint.last_save_model_only=true",
        f"checkpoint.export_dtype={dtype}",
    ]
    exported = []
    for name, extra in (("off", []), ("on", ON)):
        train(tmp_path / name, [*settings(corpus, 1), *model, *export, *extra])
        files = sorted((tmp_path / name / "checkpoint/step-1").glob("*.safetensors"))
        exported.append({name: t for file in files for name, t in load_file(file).items()})
    assert_same(exported[1], exported[0])
    start = [
        "checkpoint.initial_load_in_hf=true",
        "checkpoint.initial_load_model_only=true",
        f"checkpoint.initial_load_path='{tmp_path}/on/checkpoint/step-1'",
    ]
    for name, extra in (("off2", []), ("on2", ON)):
        train(tmp_path / name, [*settings(corpus, 1), *model, *start, *extra])
    assert losses(tmp_path / "on2") == losses(tmp_path / "off2") != losses(tmp_path / "on")
    assert_same_checkpoint(tmp_path / "on2", tmp_path / "off2", 1)


def test_a_checkpoint_written_beside_training_is_that_of_its_step(
    corpus: Path, stock: Path, tmp_path: Path
) -> None:
    beside = ["checkpoint.async_mode=async", "checkpoint.interval=2"]
    train(tmp_path, [*settings(corpus, 4), *ON, *beside])
    assert_same_checkpoint(tmp_path, stock, 2)


def test_metrics_tell_the_memory_and_the_share(corpus: Path, tmp_path: Path) -> None:
    extra = [f"{NAME}.split=0.25", f"{NAME}.bucket_parameters=20000", "checkpoint.enable=false"]

    def use(trainer: RecipeTrainer) -> int:
        trainer.train()
        assert isinstance(trainer.optimizers, StreamedOptimizers)
        return sum(weight.numel() for weight in trainer.optimizers.masters)

    parameters = train(tmp_path, [*settings(corpus, 2), *ON, *extra], use=use)
    for line in metrics(tmp_path):
        assert line["optimizer/cpu_share"] == pytest.approx(0.25, abs=0.01)
        # 12 bytes per parameter, and two gradients of up to a bucket on their way to the CPU.
        expected = 12 * parameters + 2 * 4 * 20_000
        assert abs(line["optimizer/host_gib"] * GIB - expected) <= max(0.02 * expected, PAGE)
        assert line["optimizer/staging_gib"] * GIB <= 2 * 20_000 * 12 + 2 * 20_000 * 4
        assert line["optimizer/streamed_seconds"] > 0
        assert line["optimizer/cpu_seconds"] > 0


def test_a_seed_checkpoint_is_the_stock_one(corpus: Path, tmp_path: Path) -> None:
    seed = [*settings(corpus), "checkpoint.create_seed_checkpoint=true"]
    for name, extra in (("off", []), ("on", ON)):
        train(tmp_path / name, [*seed, *extra], use=RecipeTrainer.save_seed)
    assert_same_checkpoint(tmp_path / "on", tmp_path / "off", 0)


@pytest.mark.parametrize("on", [[], ON], ids=["without", "with"])
def test_a_run_from_a_seed_is_a_fresh_run(on: list[str], corpus: Path, tmp_path: Path) -> None:
    seed = [*settings(corpus, 2), "checkpoint.create_seed_checkpoint=true"]
    train(tmp_path / "seed", seed, use=RecipeTrainer.save_seed)
    start = f"checkpoint.initial_load_path={tmp_path}/seed/checkpoint/step-0"
    train(tmp_path / "fresh", [*settings(corpus, 2), *on])
    train(tmp_path / "seeded", [*settings(corpus, 2), *on, start])
    assert losses(tmp_path / "seeded") == losses(tmp_path / "fresh")
    assert_same_checkpoint(tmp_path / "seeded", tmp_path / "fresh", 2)


def test_gradients_make_room_for_an_export(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    save = CheckpointManager.dcp_save

    def use(trainer: RecipeTrainer) -> None:
        def look(manager: Any, *args: Any, **options: Any) -> Any:
            assert options["to_hf"]
            seen.extend(weight.grad is None for weight in trainer.optimizers.masters)
            return save(manager, *args, **options)

        monkeypatch.setattr(CheckpointManager, "dcp_save", look)
        trainer.train()

    export = ["checkpoint.last_save_in_hf=true", "checkpoint.last_save_model_only=true"]
    train(tmp_path, [*settings(corpus, 1), "model=llama3_debug", *export, *ON], use=use)
    assert seen and all(seen)
