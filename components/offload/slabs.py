"""Pinned host memory of exactly the size that is needed, near the GPU that uses it.

torch's own pinned allocator rounds every block up to a power of two, so boundaries of 2.25 GiB
would take 4 GiB each. Here one anonymous mapping is registered with CUDA as it is: the rounding is
that of one page. It is made once and used in every step.
"""

import ctypes
import mmap
import os
import re
import resource
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from components.offload.accountant import gib

PAGE = mmap.PAGESIZE
SYS = Path("/sys")
_TOUCH_BYTES = 2**28
_TOUCH_THREADS = 8
_PORTABLE = 1


class PinningRefused(RuntimeError):
    """The system did not let this process pin host memory."""


def pinned_bytes(payload: int) -> int:
    """Bytes that a slab of ``payload`` bytes takes from the system."""
    return -(-payload // PAGE) * PAGE


class Slab:
    """One piece of host memory, page-locked where a CUDA device is to copy from and to it.

    Attributes:
        payload: bytes asked for.
        pinned: bytes taken, a whole number of pages.
    """

    def __init__(self, payload: int, device: torch.device, cpus: Collection[int] = ()) -> None:
        """
        Args:
            payload: bytes, at least 1.
            device: what the memory is copied from and to; it is pinned for a CUDA device.
            cpus: cores near the device; pages are placed on their node. None given: anywhere.

        Raises:
            PinningRefused: with the size, the system's answer and the limit on locked memory.
        """
        self.payload, self.pinned = payload, pinned_bytes(payload)
        # Shared, so that pages stay these ones when a process forks while a copy is under way.
        self._bytes = torch.frombuffer(mmap.mmap(-1, self.pinned), dtype=torch.uint8)
        _touch(self._bytes.data_ptr(), self.pinned, cpus)
        self._registered = device.type == "cuda"
        if self._registered:
            self._register(device)

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        """Part of the memory: uint8 (nbytes,)."""
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Unpin it and let go of it. Nothing may be copying to or from it any more."""
        if self._registered:
            self._registered = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr()))
        # The mapping goes with its last view, which a traceback may still refer to.
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _register(self, device: torch.device) -> None:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(device):
            answer = cudart.cudaHostRegister(self._bytes.data_ptr(), self.pinned, _PORTABLE)
        if int(answer) != 0:
            self._registered = False
            raise PinningRefused(
                f"the system refused to pin {gib(self.pinned)} of host memory: "
                f"{cudart.cudaGetErrorString(answer)} (cudaHostRegister, error {int(answer)}); "
                f"limit on locked memory (ulimit -l): {_locked_memory_limit()}"
            )


def _locked_memory_limit() -> str:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "none" if soft == resource.RLIM_INFINITY else gib(soft)


def _touch(address: int, nbytes: int, cpus: Collection[int]) -> None:
    """Write every page once, from threads on ``cpus``: the system places a page where it is first
    written. Threads of their own, so that nobody else's affinity changes."""
    starts = range(0, nbytes, _TOUCH_BYTES)

    def stay() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)

    def fill(start: int) -> None:
        ctypes.memset(address + start, 0, min(_TOUCH_BYTES, nbytes - start))

    workers = min(_TOUCH_THREADS, len(starts), len(cpus) or _TOUCH_THREADS)
    with ThreadPoolExecutor(workers, "touch", initializer=stay) as pool:
        list(pool.map(fill, starts))


def cpus_near(device: torch.device) -> set[int]:
    """Cores on the NUMA node of a CUDA device that this process may use.

    Empty where the machine does not tell the node, has only one, or grants none of its cores.
    """
    if device.type != "cuda":
        return set()
    # torch's type stubs do not know where a device sits.
    properties: Any = torch.cuda.get_device_properties(device)
    return cpus_of_pci_device(
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        f":{properties.pci_device_id:02x}.0"
    )


def cpus_of_pci_device(address: str) -> set[int]:
    """See ``cpus_near``; the device is given by its PCI address, such as "0000:4b:00.0"."""
    file = SYS / "bus/pci/devices" / address / "numa_node"
    node = file.read_text().strip() if file.is_file() else "-1"
    cores = SYS / f"devices/system/node/node{node}/cpulist"
    if not node.isdigit() or not cores.is_file():
        return set()
    near: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", cores.read_text()):
        near |= set(range(int(first), int(last or first) + 1))
    return near & os.sched_getaffinity(0)
