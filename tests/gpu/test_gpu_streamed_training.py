"""On a GPU: training with AdamW's state on the host is the run without, to the bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtitan.tools.utils

from components.offload.accountant import host_accountant
from components.titan.trainer import RecipeTrainer
from tests.training import checkpoint_state, losses, small_overrides, train, write_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

NAME = "components.offload_stream_adamw"
STREAMED = [f"{NAME}.enabled=true", f"{NAME}.split=0", f"{NAME}.bucket_parameters=20000"]
"""The device's kernel updates everything, as in the run without."""

BOTH = [f"{NAME}.enabled=true", f"{NAME}.split=0.5", f"{NAME}.bucket_parameters=20000"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("streamed") / "corpus")


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    yield
    assert NAME not in host_accountant().holdings


def settings(corpus: Path, steps: int = 4) -> list[str]:
    return [
        *small_overrides(corpus),
        "model.attention=sdpa",
        "training.mixed_precision_param=bfloat16",
        "optimizer.no_decay=['norm']",
        "debug.deterministic=true",
        "checkpoint.interval=2",
        f"training.steps={steps}",
    ]


@pytest.fixture(scope="module")
def stock(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("stock")
    train(run, settings(corpus))
    return run


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = checkpoint_state(checkpoint)
    found = {**state, **{f"optimizer.{n}": value for n, value in state["optimizer"].items()}}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def assert_same_checkpoint(left: Path, right: Path, step: int) -> None:
    first, second = (tensors(run / f"checkpoint/step-{step}") for run in (left, right))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and torch.equal(value, second[name]), name


def continued(source: Path, step: int, run: Path) -> Path:
    """A run directory whose latest checkpoint is another run's."""
    (run / "checkpoint").mkdir(parents=True)
    (run / f"checkpoint/step-{step}").symlink_to(source / f"checkpoint/step-{step}")
    return run


def test_the_run_without_repeats_itself(corpus: Path, stock: Path, tmp_path: Path) -> None:
    """What the comparisons below rest on."""
    train(tmp_path, settings(corpus))
    assert_same_checkpoint(tmp_path, stock, 4)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_losses_and_checkpoints_are_equal_to_the_bit(
    mode: str, corpus: Path, stock: Path, tmp_path: Path
) -> None:
    train(tmp_path, [*settings(corpus), *STREAMED, f"checkpoint.async_mode={mode}"])
    assert losses(tmp_path) == losses(stock)
    for step in (2, 4):
        assert_same_checkpoint(tmp_path, stock, step)


def test_the_cpus_share_differs_in_last_places_at_most(corpus: Path, tmp_path: Path) -> None:
    """After one step: a second one would begin with other weights, and end with other gradients."""
    for name, extra in (("off", []), ("on", BOTH)):
        train(tmp_path / name, [*settings(corpus, 1), *extra])
    on, off = (tensors(tmp_path / name / "checkpoint/step-1") for name in ("on", "off"))
    assert on.keys() == off.keys()
    assert any(name.startswith("optimizer.") and name.endswith("exp_avg") for name in on)
    for name, value in on.items():
        # Of the learning rate, 3e-4, the absolute part is a few roundings.
        torch.testing.assert_close(value, off[name], rtol=1e-6, atol=1e-9, msg=name)


def test_a_run_with_a_fixed_share_repeats_itself(corpus: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(tmp_path / name, [*settings(corpus), *BOTH])
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert_same_checkpoint(tmp_path / "one", tmp_path / "two", 4)


@pytest.mark.parametrize("kind", [STREAMED, []], ids=["to the host", "back to the device"])
def test_a_checkpoint_goes_on_in_a_run_of_the_other_kind(
    kind: list[str], corpus: Path, stock: Path, tmp_path: Path
) -> None:
    source = stock
    if not kind:
        source = tmp_path / "first"
        train(source, [*settings(corpus, 2), *STREAMED])
    run = continued(source, 2, tmp_path / "second")
    train(run, [*settings(corpus), *kind])
    assert losses(run) == losses(stock)[2:]
    assert_same_checkpoint(run, stock, 4)


def test_an_export_starts_the_same_run(corpus: Path, tmp_path: Path) -> None:
    """Through an adapter, and through modules that take their weights apart when they save."""
    llama = [*settings(corpus, 1), "model=llama3_debug", "model.attention=sdpa"]
    export = ["checkpoint.last_save_in_hf=true", "checkpoint.last_save_model_only=true"]
    train(tmp_path / "first", [*llama, *STREAMED, *export])
    start = [
        "checkpoint.initial_load_in_hf=true",
        "checkpoint.initial_load_model_only=true",
        f"checkpoint.initial_load_path='{tmp_path}/first/checkpoint/step-1'",
    ]
    for name, extra in (("off", []), ("on", STREAMED)):
        train(tmp_path / name, [*llama, *start, *extra])
    assert losses(tmp_path / "on") == losses(tmp_path / "off") != losses(tmp_path / "first")
    assert_same_checkpoint(tmp_path / "on", tmp_path / "off", 1)


def test_masters_are_pinned_and_nothing_of_them_is_on_the_device(
    corpus: Path, tmp_path: Path
) -> None:
    def use(trainer: RecipeTrainer) -> dict[str, Any]:
        trainer.train()
        optimizers = trainer.optimizers
        for weight, master in optimizers.masters.items():
            local = master.to_local()
            assert (local.device.type, weight.device.type) == ("cpu", "cuda")
            assert local.numel() == 0 or local.is_pinned()
            assert weight.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
            assert torch.equal(weight.to_local().cpu(), local.to(torch.bfloat16))
        weights = sum(weight.numel() for weight in optimizers.masters)
        optimizers.zero_grad()
        return {"weights": weights, "allocated": torch.cuda.memory_allocated()}

    # Large enough to be seen beside what libraries allocate.
    large = ["model.dim=1024", "model.expert_hidden_dim=2048", "checkpoint.enable=false"]
    found = train(tmp_path, [*settings(corpus, 2), *STREAMED, *large], use=use)
    stay = found["allocated"] - 2 * found["weights"]
    assert stay < 4 * found["weights"], found
