"""Choose the device that torchtitan runs on, the CPU included.

torchtitan 0.3.0 looks for an accelerator once, when ``torchtitan.tools.utils`` is imported, and
several of its modules copy the result. ``use_device`` therefore has to run before any other
torchtitan module is imported. This is the project's only patch of torchtitan.
"""

import platform
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal

import torch

from components.core import host
from components.titan.story import narrate

DeviceKind = Literal["auto", "cpu", "cuda"]

# These copy torchtitan.tools.utils' device names when they are imported.
_COPIES_DEVICE_AT_IMPORT = (
    "torchtitan.components.metrics",
    "torchtitan.distributed.utils",
    "torchtitan.distributed.parallel_dims",
    "torchtitan.models.common.token_dispatcher",
    "torchtitan.tools.profiler",
)


def _status_bytes(key: str) -> int:
    """Read a ``kB`` entry of /proc/self/status, in bytes; 0 where /proc does not offer it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_resident_bytes() -> int:
    """Peak resident set size of this process since the last reset, in bytes."""
    return _status_bytes("VmHWM")


def reset_peak_resident_bytes() -> None:
    """Start a new interval for ``peak_resident_bytes`` (proc(5): clear_refs, value 5)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # Some containers forbid it.
        _tell_of_one_interval()


@cache
def _tell_of_one_interval() -> None:
    """Said once; every step asks for a new interval."""
    narrate(
        "memory: /proc/self/clear_refs cannot be written here, so the peak reported is the peak "
        "since the process started, not of each step"
    )


class CpuDevice(ModuleType):
    """The part of ``torch.cuda``'s interface that torchtitan calls, over host memory.

    Peak memory is the peak resident set of the process, so that the memory column of a CPU run is
    a measurement and CPU tests can assert that a technique saves memory.
    """

    memory = SimpleNamespace(
        _record_memory_history=lambda *args, **kwargs: None,
        _snapshot=lambda *args, **kwargs: {"segments": [], "device_traces": []},
    )

    def __init__(self) -> None:
        super().__init__("cpu_device")

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: object) -> None:
        return None

    @staticmethod
    def synchronize(device: object = None) -> None:
        return None

    @staticmethod
    def empty_cache() -> None:
        return None

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return f"CPU ({platform.machine()})"

    @staticmethod
    def get_device_properties(device: object = None) -> SimpleNamespace:
        return SimpleNamespace(name="CPU", total_memory=host.memory_total())

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        reset_peak_resident_bytes()

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        peak = peak_resident_bytes()
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }


def resolve_device(kind: DeviceKind) -> Literal["cpu", "cuda"]:
    """``auto`` becomes ``cuda`` where a CUDA device is visible, ``cpu`` elsewhere.

    Raises:
        ValueError: ``cuda`` was asked for and no CUDA device is visible, or ``kind`` is unknown.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"hardware.device: {kind!r} is not one of 'auto', 'cpu', 'cuda'")
    available = torch.cuda.is_available()
    if kind == "auto":
        return "cuda" if available else "cpu"
    if kind == "cuda" and not available:
        raise ValueError(
            "hardware.device: 'cuda' was asked for, but torch sees no CUDA device "
            f"(torch {torch.__version__}, built for CUDA {torch.version.cuda}); "
            "use hardware.device=cpu or hardware.device=auto, or look at `make doctor`"
        )
    return "cuda" if kind == "cuda" else "cpu"


def use_device(kind: DeviceKind = "auto") -> Literal["cpu", "cuda"]:
    """Make torchtitan use this device; call it before importing any other torchtitan module.

    Returns:
        The device type in use.

    Raises:
        ValueError: see ``resolve_device``.
        RuntimeError: torchtitan was already imported with another device.
    """
    device = resolve_device(kind)
    if device == "cpu":
        use_cpu()
    elif _current_device_type() not in (None, "cuda"):
        raise RuntimeError("hardware.device: torchtitan already runs on the CPU in this process")
    return device


def _current_device_type() -> str | None:
    utils = sys.modules.get("torchtitan.tools.utils")
    return getattr(utils, "device_type", None)


def use_cpu() -> None:
    """Run torchtitan on the CPU (gloo). Safe to call repeatedly.

    Raises:
        RuntimeError: torchtitan modules that copied another device are already imported.
    """
    if _current_device_type() == "cpu":
        return
    early = [name for name in _COPIES_DEVICE_AT_IMPORT if name in sys.modules]
    if early:
        raise RuntimeError(f"use_cpu() must run before these are imported: {', '.join(early)}")
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", CpuDevice()
    _build_block_masks_eagerly()


def _build_block_masks_eagerly() -> None:
    """torch and torchtitan compile block-mask construction; on a CPU that is a minute a shape."""
    import torch.distributed.tensor.experimental._context_parallel._attention as context_parallel
    import torchtitan.models.common.attention as attention
    from torch.nn.attention.flex_attention import create_block_mask

    attention._compiled_create_block_mask = create_block_mask
    context_parallel._compiled_create_block_mask = create_block_mask  # type: ignore[assignment]
