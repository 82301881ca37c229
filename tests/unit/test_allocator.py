"""Settings of CUDA's allocator; torch keeps them without a GPU as well."""

from collections.abc import Callable, Iterator

import pytest
import torch

from components.core.recipe import Hardware
from components.titan.allocator import expand_segments
from components.titan.device import DeviceKind
from launch.worker import set_allocator


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
    assert "with max_split_size_mb:128,garbage_collection_threshold:0.8" in note


def test_lists_of_values_stay_whole() -> None:
    torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:[256:1, 512:2, >:8],")
    assert "with roundup_power2_divisions:[256:1,512:2,>:8]" in expand_segments()
    assert ",".join(settings()) == (
        "roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True"
    )


@pytest.mark.parametrize(
    ("said", "told"), [(":True", False), (":False", True), (" : False ", True)]
)
def test_a_recipe_overrules_the_environment_and_says_so(said: str, told: bool) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments{said}")
    assert ("says otherwise" in expand_segments()) == told
    assert settings() == ["expandable_segments:True"]


@pytest.mark.parametrize(
    ("device", "wanted", "grow"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_ranks_do_as_the_recipe_says(device: DeviceKind, wanted: bool, grow: bool) -> None:
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:128")
    set_allocator(Hardware(expandable_segments=wanted), device)
    assert settings() == ["max_split_size_mb:128", *["expandable_segments:True"] * grow]


def environment(monkeypatch: pytest.MonkeyPatch, read: Callable[[], str]) -> None:
    """Torch reads it once, when it first asks."""
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", read)


def test_an_allocator_without_segments_is_not_said_to_grow_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        environment(patched, lambda: " backend : cudaMallocAsync ")
        assert "cudaMallocAsync has no segments" in expand_segments()
    assert "expandable_segments:True" not in settings()


def test_settings_that_torch_cannot_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> str:
        raise ValueError("Unrecognized key 'max_split' in allocator config.")

    with monkeypatch.context() as patched:
        environment(patched, read)
        with pytest.raises(
            ValueError, match=r"^PYTORCH_ALLOC_CONF \(.*\): .*'max_split'.*config; legal"
        ):
            expand_segments()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_new_segments_grow() -> None:
    expand_segments()
    torch.cuda.empty_cache()
    held = torch.empty(2**28, device="cuda")
    grown = [s for s in torch.cuda.memory_snapshot() if s["is_expandable"]]
    assert sum(s["total_size"] for s in grown) >= held.nbytes
