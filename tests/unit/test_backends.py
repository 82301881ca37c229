"""How an implementation is chosen: by what is asked for, and by what the machine can run."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.backends import machine
from kernels.backends.ops import HYPER_CONNECTIONS, INDEXER, SPARSE_MLA
from kernels.backends.registry import ITEMSIZE, Backend, Choice, Operation

SHAPE = {"model.n_heads": 48}


def only_64(device: str, shape: Any) -> str | None:
    heads = shape["model.n_heads"]
    return None if heads == 64 else f"model.n_heads: {heads} is not taken; supported: 64"


def operation(**more: Any) -> Operation:
    made = Operation("product", "model.product_kernel")
    made.add(Backend("quick", dict, only_64, automatic=True))
    made.add(Backend("odd", dict))
    return made


def test_auto_says_what_it_took_and_why_not_something_else() -> None:
    assert operation().choose("auto", "cuda", {"model.n_heads": 64}) == Choice(
        "quick", "product kernel: quick (auto on cuda)"
    )
    assert operation().choose("auto", "cuda", SHAPE) == Choice(
        "torch",
        "product kernel: torch (auto on cuda; not quick: model.n_heads: 48 is not taken; "
        "supported: 64)",
    )


def test_auto_takes_nothing_that_has_to_be_asked_for() -> None:
    made = Operation("product", "model.product_kernel")
    made.add(Backend("odd", dict))
    assert made.choose("auto", "cpu", SHAPE).note == "product kernel: torch (auto on cpu)"
    assert made.choose("odd", "cpu", SHAPE) == Choice("odd", "product kernel: odd")


def test_what_is_asked_for_and_cannot_run_is_an_error_that_names_the_reference() -> None:
    with pytest.raises(ValueError) as caught:
        operation().choose("quick", "cuda", SHAPE)
    assert str(caught.value) == (
        "model.product_kernel: 'quick' cannot run here: model.n_heads: 48 is not taken; "
        "supported: 64; legal here: 'torch' (the reference path) or 'auto'"
    )
    assert operation().choose("torch", "cuda", SHAPE).backend == "torch"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'fast' is no .*: 'auto', 'torch', 'quick', 'odd'"):
        operation().choose("fast", "cpu", SHAPE)


def test_an_implementation_is_imported_once() -> None:
    made, loads = Operation("product", "model.product_kernel"), []
    made.add(Backend("quick", lambda: loads.append(1) or object()))
    assert made.load("quick") is made.load("quick") and loads == [1]


MACHINES: dict[str, tuple[str, bool, tuple[int, int] | None, int, str | None]] = {
    "a CPU": ("cpu", True, None, 2, "run on CUDA only, and this run is on the cpu"),
    "Hopper": ("cuda", True, (9, 0), 2, None),
    "Blackwell": ("cuda", True, (10, 0), 2, "are for sm_90 .* the GPU is sm_100"),
    "Ampere": ("cuda", True, (8, 0), 2, "are for sm_90 .* the GPU is sm_80"),
    "a login node": ("cuda", True, None, 2, None),
    "no package": ("cuda", False, (9, 0), 2, "the package tilelang is not installed"),
    "float32": ("cuda", True, (9, 0), 4, "bfloat16, and training.mixed_precision_param is float32"),
}


@pytest.mark.parametrize(
    ("device", "installed", "found", "itemsize", "reason"), MACHINES.values(), ids=MACHINES
)
def test_what_a_machine_lacks_is_said(
    device: str,
    installed: bool,
    found: tuple[int, int] | None,
    itemsize: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = object() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)
    answer = machine.why_not("tilelang", device, machine.HOPPER, {ITEMSIZE: itemsize})
    if reason is None:
        assert answer is None
    else:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(answer)


@pytest.mark.parametrize(
    "made", [SPARSE_MLA, INDEXER, HYPER_CONNECTIONS], ids=lambda made: made.name
)
def test_on_a_cpu_every_operation_has_its_reference(made: Operation) -> None:
    choice = made.choose("auto", "cpu", {})
    assert choice.backend == "torch"
    kernels = [name for name, backend in made.backends.items() if backend.automatic]
    assert len(kernels) == 1
    with pytest.raises(ValueError, match=f"{made.key}: '{kernels[0]}' cannot run here.*'torch'"):
        made.choose(kernels[0], "cpu", {})


@pytest.mark.parametrize(("found", "runs"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_kernels_in_plain_triton_run_on_newer_gpus_too(
    found: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)
    answer = machine.why_not("triton", "cuda", machine.AMPERE_ON, {})
    assert (answer is None) == runs


LIMITS: dict[str, tuple[str, dict[str, Any], dict[str, int], str | None]] = {
    "attention": (
        "sparse_mla.shape", {"HEADS": 64, "WIDTHS": (256, 512), "SIZES": (1, 2, 4)}, {}, None,
    ),
    "heads": (
        "sparse_mla.shape", {"HEADS": 64, "WIDTHS": (256, 512), "SIZES": (1, 2, 4)},
        {"model.n_heads": 48}, "model.n_heads: 48 is not taken; supported: multiples of 64",
    ),
    "latent": (
        "sparse_mla.shape", {"HEADS": 64, "WIDTHS": (256, 512), "SIZES": (1, 2, 4)},
        {"model.kv_lora_rank": 32}, "model.kv_lora_rank: 32 is not taken; supported: 256, 512",
    ),
    "indexer": ("indexer.op", {"HEADS": (8, 32), "DIMS": (64, 128), "MOST_CHOSEN": 512}, {}, None),
    "width": (
        "indexer.op", {"HEADS": (8, 32), "DIMS": (64, 128), "MOST_CHOSEN": 512},
        {"model.index_head_dim": 16}, "model.index_head_dim: 16 is not taken; supported: 64, 128",
    ),
    "selection": (
        "indexer.op", {"HEADS": (8, 32), "DIMS": (64, 128), "MOST_CHOSEN": 512},
        {"model.index_topk": 4096}, "model.index_topk: 4096 is not taken; supported: to 2048",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("where", "values", "changes", "reason"), LIMITS.values(), ids=LIMITS)
def test_a_dimension_that_a_kernel_does_not_take_is_named(
    where: str,
    values: dict[str, Any],
    changes: dict[str, int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (where.split(".")[0], where):
        module = ModuleType(f"kernels.{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(sys.modules[f"kernels.{where}"]).update(values)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shape = {
        "model.n_heads": 64, "model.kv_lora_rank": 512, "model.index_kpool": 4,
        "model.index_topk": 2048, "model.index_n_heads": 32, "model.index_head_dim": 128,
    }  # fmt: skip
    made = SPARSE_MLA if "sparse" in where else INDEXER
    (backend,) = [b for b in made.backends.values() if b.automatic]
    assert backend.why_not("cuda", shape | changes) == reason


@pytest.mark.parametrize(("streams", "taken"), [(2, True), (3, False), (4, True), (8, False)])
def test_kernels_take_two_or_four_streams(
    streams: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = HYPER_CONNECTIONS.backends["triton"].why_not("cuda", {"model.hc_mult": streams})
    wrong = f"model.hc_mult: {streams} is not taken; supported: 2, 4"
    assert reason == (None if taken else wrong)
