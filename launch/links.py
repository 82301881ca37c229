"""How fast bytes move between host and devices, and between devices. Needs CUDA."""

import time
from collections.abc import Callable

import torch

_BYTES = 512 * 2**20
_REPEATS = 5


def host_links(device: int) -> tuple[float, float]:
    """GB/s (1e9 bytes) from pinned host memory to ``device`` and back, one way at a time."""
    here = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    up = _rate(lambda: there.copy_(here, non_blocking=True), device)
    down = _rate(lambda: here.copy_(there, non_blocking=True), device)
    return up, down


def peer_link(source: int, target: int) -> tuple[float, bool]:
    """GB/s from one device to another, and whether they reach each other without the host."""
    first = torch.empty(_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    second = torch.empty(_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
    rate = _rate(lambda: second.copy_(first, non_blocking=True), source, target)
    return rate, torch.cuda.can_device_access_peer(source, target)


def _rate(copy: Callable[[], object], *devices: int) -> float:
    """Best of several: someone else's load must not make a link look slow."""
    seconds = []
    for _ in range(_REPEATS):
        _wait(devices)
        started = time.perf_counter()
        copy()
        _wait(devices)
        seconds.append(time.perf_counter() - started)
    return _BYTES / min(seconds) / 1e9


def _wait(devices: tuple[int, ...]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
