"""Settings of CUDA's allocator; torch keeps them without a GPU as well."""

from collections.abc import Iterator

import pytest
import torch

from components.titan.allocator import expand_segments


@pytest.fixture(autouse=True)
def _settings_return() -> Iterator[None]:
    before = torch._C._accelerator_getAllocatorSettings()
    yield
    torch._C._accelerator_setAllocatorSettings(before)


def settings() -> list[str]:
    return torch._C._accelerator_getAllocatorSettings().split(",")


def test_segments_grow_and_other_settings_stay() -> None:
    torch._C._accelerator_setAllocatorSettings(
        "max_split_size_mb:128,garbage_collection_threshold:0.8"
    )
    note = expand_segments()
    assert settings() == [
        "max_split_size_mb:128",
        "garbage_collection_threshold:0.8",
        "expandable_segments:True",
    ]
    assert "with max_split_size_mb:128, garbage_collection_threshold:0.8" in note


@pytest.mark.parametrize(("said", "told"), [("True", False), ("False", True)])
def test_a_recipe_overrules_the_environment_and_says_so(said: str, told: bool) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{said}")
    assert ("says otherwise" in expand_segments()) == told
    assert settings() == ["expandable_segments:True"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_new_segments_grow() -> None:
    expand_segments()
    torch.cuda.empty_cache()
    held = torch.empty(2**28, device="cuda")
    grown = [s for s in torch.cuda.memory_snapshot() if s["is_expandable"]]
    assert sum(s["total_size"] for s in grown) >= held.nbytes
