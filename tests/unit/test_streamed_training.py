"""Training with AdamW's state on the host: weights, losses and checkpoints of the run without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.core.base import Component
from components.offload.accountant import GIB, host_accountant
from components.offload.slabs import PAGE
from components.titan.streamed_optimizer import NonFiniteGradient, StreamedOptimizers
from components.titan.trainer import RecipeTrainer
from tests.training import (
    checkpoint_state,
    full,
    losses,
    metrics,
    small_overrides,
    train,
    write_corpus,
)

NAME = "components.offload_stream_adamw"
ON = [f"{NAME}.enabled=true", f"{NAME}.split=0"]
BF16 = "training.mixed_precision_param=bfloat16"
LEAN = ["components.chunked_loss.enabled=false", "training.local_batch_size=1"]
GLM = ["model=glm_flash_tiny", "model.index_topk=16", "components.indexer_training.enabled=true"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("streamed") / "corpus")


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    yield
    assert NAME not in host_accountant().holdings


def settings(corpus: Path, steps: int = 3) -> list[str]:
    """Experts, a fused projection, two parameter groups."""
    groups = "optimizer.no_decay=['norm']"
    return [*small_overrides(corpus), *LEAN, BF16, groups, f"training.steps={steps}"]


@pytest.fixture(scope="module")
def stock(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, a checkpoint every two."""
    run = tmp_path_factory.mktemp("stock")
    train(run, [*settings(corpus, 4), "checkpoint.interval=2"])
    return run


def assert_same(left: Any, right: Any, name: str = "") -> None:
    """Equal to the bit, dtypes included."""
    assert type(left) is type(right), name
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right), name
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), name
        for key, value in left.items():
            assert_same(value, right[key], f"{name}.{key}")
    else:
        assert left == right, name


def assert_same_checkpoint(left: Path, right: Path, step: int) -> None:
    folders = (run / f"checkpoint/step-{step}" for run in (left, right))
    first, second = (checkpoint_state(folder) for folder in folders)
    assert any(name.endswith("exp_avg_sq") for name in first["optimizer"])
    assert_same(first, second)


def continued(source: Path, step: int, run: Path) -> Path:
    """A run directory whose latest checkpoint is another run's."""
    (run / "checkpoint").mkdir(parents=True)
    (run / f"checkpoint/step-{step}").symlink_to(source / f"checkpoint/step-{step}")
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
        ["training.mixed_precision_param=float32", "training.steps=2"],
        ["training.global_batch_size=3", "training.steps=2", "debug.leak_guard=true"],
        ["components.ring_dtp.enabled=true", "training.steps=2"],
    ],
    ids=["float32 modules, frozen weights", "float32", "accumulation", "head outside of FSDP"],
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


class Spoiler(Component):
    """Puts a number into a gradient of one step."""

    name = "spoiler"
    summary = "breaks a gradient"

    def __init__(self, step: int, value: float) -> None:
        super().__init__(Component.Config(enabled=True))
        self.step, self.value = step, value

    def after_microbatch(self, trainer: RecipeTrainer) -> None:
        if trainer.step == self.step:
            weight = trainer.model_parts[0].get_parameter("layers.0.attention.wo.weight")
            weight.grad._local_tensor.view(-1)[7] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_gradient_ends_the_run_and_changes_nothing(
    value: float, corpus: Path, stock: Path, tmp_path: Path
) -> None:
    def use(trainer: RecipeTrainer) -> None:
        with pytest.raises(NonFiniteGradient, match=rf"{NAME}\.nonfinite: 'raise'.*as before"):
            trainer.train()
        trainer.step = 2
        trainer.checkpointer.save_now(2)

    train(tmp_path, [*settings(corpus, 4), *ON], use=use, components=[Spoiler(3, value)])
    left, right = (checkpoint_state(run / "checkpoint/step-2") for run in (tmp_path, stock))
    for name, value in {**right, **right["optimizer"]}.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal({**left, **left["optimizer"]}[name], value), name


def test_a_broken_step_can_be_left_out(corpus: Path, tmp_path: Path) -> None:
    def use(trainer: RecipeTrainer) -> dict[str, Any]:
        kept: dict[str, Any] = {}

        def note() -> None:
            for module in trainer.model_parts[0].modules():
                counts = getattr(module, "tokens_per_expert_E", None)
                assert counts is None or not counts.any(), "counts would go into the next step"
            state = {**trainer.checkpointer.states["model"].state_dict()}
            state |= trainer.optimizers.state_dict()
            kept[trainer.step] = {k: full(v) for k, v in state.items() if hasattr(v, "clone")}

        step = trainer.train_step

        def and_note(iterator: object) -> None:
            step(iterator)
            note()

        trainer.train_step = and_note
        trainer.train()
        return kept

    overrides = [*settings(corpus, 4), *ON, f"{NAME}.nonfinite=skip", "checkpoint.enable=true"]
    states = train(tmp_path, overrides, use=use, components=[Spoiler(2, float("nan"))])
    changed = {
        step: [n for n, v in states[step].items() if not torch.equal(v, states[step - 1][n])]
        for step in (2, 3)
    }
    assert changed[2] == []
    assert any(name.endswith("expert_bias_E") for name in changed[3])
    assert len(changed[3]) > 50
    steps = [int(v) for name, v in states[4].items() if name.endswith(".step")]
    assert set(steps) == {3}
    assert [line["optimizer/skipped_steps"] for line in metrics(tmp_path)] == [0, 1, 1, 1]
    loads = [line["moe/max_over_mean_load"] for line in metrics(tmp_path)]
    assert all(1 <= load <= 4 for load in loads)


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
    left, right = (checkpoint_state(tmp_path / n / "checkpoint/step-0") for n in ("on", "off"))
    assert left.keys() == right.keys()
    assert left["optimizer"].keys() == right["optimizer"].keys()
    for name, value in right.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(left[name], value), name
