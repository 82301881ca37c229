"""How time and memory are read on each device."""

import ctypes
import gc
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

Device = Literal["cpu", "cuda"]

_FLUSH_BYTES = 256 * 2**20
"""More than any last-level cache in use, so that each repeat starts with its inputs in memory."""

_RSS_CALLS = 5


@dataclass(kw_only=True, slots=True)
class Memory:
    """Bytes seen during one call.

    Attributes:
        peak: what the probe's ``peak_label`` says.
        reserved: peak held by the caching allocator; None where there is none.
        resident: in use just before the call (inputs, library workspaces, the process itself).
    """

    peak: int
    reserved: int | None
    resident: int


class Probe(Protocol):
    """Clock and memory meter of one device."""

    device: Device
    clock_label: str
    peak_column: str
    peak_label: str

    def time_ms(self, call: Callable[[], Any]) -> float:
        """Milliseconds for one call, the device idle before and after."""

    def flush(self) -> None:
        """Push the inputs out of the caches."""

    def settle(self) -> None:
        """Free what nothing refers to, and give cached blocks back."""

    def memory(self, call: Callable[[], Any]) -> Memory:
        """Peak memory of one call, with statistics reset and caches emptied first."""


class CudaProbe:
    device: Device = "cuda"
    clock_label = "CUDA events around each call, synchronised before and after"
    peak_column = "peak allocated"
    peak_label = "peak bytes allocated by torch, inputs included"

    def __init__(self) -> None:
        self._flush_buffer: torch.Tensor | None = None

    def time_ms(self, call: Callable[[], Any]) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return start.elapsed_time(end)

    def flush(self) -> None:
        if self._flush_buffer is None:
            self._flush_buffer = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._flush_buffer.zero_()

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def memory(self, call: Callable[[], Any]) -> Memory:
        self.settle()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return Memory(
            peak=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.max_memory_reserved(),
            resident=resident,
        )


class CpuProbe:
    device: Device = "cpu"
    clock_label = "time.perf_counter around each call"
    peak_column = "peak RSS delta"
    peak_label = (
        "growth of the resident set (VmHWM after a clear_refs reset, less VmRSS before), "
        f"median of {_RSS_CALLS} calls; includes freed blocks that malloc keeps"
    )

    def __init__(self) -> None:
        self._flush_buffer: torch.Tensor | None = None

    def time_ms(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        result = call()
        elapsed = time.perf_counter() - start
        del result
        return elapsed * 1e3

    def flush(self) -> None:
        if self._flush_buffer is None:
            self._flush_buffer = torch.empty(_FLUSH_BYTES, dtype=torch.uint8)
        self._flush_buffer.zero_()

    def settle(self) -> None:
        gc.collect()
        if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
            # Freed blocks below malloc's mmap threshold stay in the process and would hide
            # the next call's allocations from its resident set.
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def memory(self, call: Callable[[], Any]) -> Memory:
        """Resident-set growth during one call, the median of several.

        Each reading is true to a few hundred KiB, but how many freed blocks malloc keeps for
        reuse during the call differs from one call to the next.

        Raises:
            OSError: the kernel does not let this process reset its peak (not Linux, or a
                container that hides /proc/self/clear_refs).
        """
        readings = sorted(self._read_once(call) for _ in range(_RSS_CALLS))
        growth, resident = readings[_RSS_CALLS // 2]
        return Memory(peak=growth, reserved=None, resident=resident)

    def _read_once(self, call: Callable[[], Any]) -> tuple[int, int]:
        self.settle()
        Path("/proc/self/clear_refs").write_text("5")
        resident = _status_bytes("VmRSS")
        result = call()
        peak = _status_bytes("VmHWM")
        del result
        return max(peak - resident, 0), resident


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def make_probe(device: Device) -> Probe:
    """The probe of a device that ``torch`` can use."""
    return CudaProbe() if device == "cuda" else CpuProbe()
