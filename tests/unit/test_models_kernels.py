"""What a model's choice of kernels says and swaps, per device."""

from pathlib import Path
from typing import Any

import pytest

from components.models.settings import KernelChoice
from components.titan import attention
from components.titan.build import prepare
from launch.config.load import load_recipe
from tests.unit.config_support import STEADY, write_recipe
from tests.unit.models_support import tiny_moe

CHOICES: dict[str, tuple[dict[str, Any], str, tuple[Any, ...], str]] = {
    "auto on a CPU": ({}, "cpu", (attention.sdpa,), "attention: sdpa (auto on cpu)"),
    "auto on a GPU": ({}, "cuda", (attention.quick_flex,), "attention: flex (auto on cuda)"),
    "sdpa": ({"attention": "sdpa"}, "cuda", (attention.sdpa,), "attention: sdpa"),
    "flex": ({"attention": "flex"}, "cuda", (attention.quick_flex,), "attention: flex"),
    "as torchtitan ships it": (
        {"flex_autotune": True}, "cuda", (), "attention: flex (auto on cuda)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "device", "overrides", "note"), CHOICES.values(), ids=CHOICES)
def test_a_choice_says_what_runs(
    changes: dict[str, Any], device: str, overrides: tuple[Any, ...], note: str
) -> None:
    choice = tiny_moe(**changes).choose_kernels(device)
    assert choice == KernelChoice(overrides=overrides, notes=(note,))


def test_varlen_keeps_torchtitans_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "get_cuda_flash_attention_impl", lambda: "FA2")
    choice = tiny_moe(attention="varlen").choose_kernels("cuda")
    assert choice == KernelChoice(notes=("attention: varlen",))


def test_a_kernel_that_cannot_train_on_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="model.attention: 'flex' has no backward pass on a CPU"):
        tiny_moe(attention="flex").choose_kernels("cpu")


def test_the_notes_of_a_run_begin_with_the_kernels(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, STEADY), []).recipe
    run = prepare(recipe, tmp_path, "cpu", 1)
    assert run.notes == ["attention: sdpa (auto on cpu)", "components: chunked_loss"]
