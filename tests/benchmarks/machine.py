"""What the machine is, and what it can do at best: the ceilings that every floor divides by.

The ceilings are measured in the same run as the variants. Rates are decimal: 1 GB/s = 1e9 bytes/s,
1 TFLOP/s = 1e12 operations/s. A copy counts bytes read plus bytes written, a host link the bytes
that cross it in one direction.
"""

import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.probes import Device, Probe

_REPEATS = 10
_WARMUP = 3


@dataclass(kw_only=True, slots=True)
class Ceilings:
    """Measured best rates of one machine.

    Attributes:
        matmul_tflops: input dtype name -> TFLOP/s of a large square matrix product.
        memory_gbps: copy within the device's memory (the host's, on a CPU), read + written.
        host_to_device_gbps: pinned host memory to the device; None on a CPU.
        device_to_host_gbps: the opposite way; None on a CPU.
        both_ways_gbps: each way while both run; None on a CPU.
    """

    matmul_tflops: Mapping[str, float]
    memory_gbps: float
    host_to_device_gbps: float | None = None
    device_to_host_gbps: float | None = None
    both_ways_gbps: float | None = None


@dataclass(kw_only=True, slots=True)
class Machine:
    """One machine in one run: ``facts`` are versions and counts for the record."""

    device: Device
    name: str
    facts: Mapping[str, str | int | float]
    ceilings: Ceilings

    @property
    def slug(self) -> str:
        """``name`` in lower case, fit for a file name."""
        words = re.sub(r"\((r|tm)\)", "", self.name.lower())
        return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


@dataclass(kw_only=True, slots=True)
class Floor:
    """The time no variant can beat by more than the ceilings' own error.

    Attributes:
        ms: milliseconds for one call.
        arithmetic: how it was counted, for a reader to check.
        ceiling: the rate that sets it: "memory" or a dtype of ``Ceilings.matmul_tflops``.
    """

    ms: float
    arithmetic: str
    ceiling: str


def roofline(
    machine: Machine, *, dtype: str, flops: float, flops_text: str, nbytes: float, bytes_text: str
) -> Floor:
    """The larger of the arithmetic time and the memory time.

    Args:
        machine: whose ceilings to divide by.
        dtype: of the matrix products; picks the arithmetic ceiling.
        flops: operations that one call must do (a multiply-add is two).
        flops_text: how ``flops`` was counted.
        nbytes: fewest bytes one call must move: inputs read once, outputs written once.
        bytes_text: how ``nbytes`` was counted.

    Raises:
        ValueError: no matrix product of ``dtype`` was measured on this machine.
    """
    rates = machine.ceilings.matmul_tflops
    if dtype not in rates:
        raise ValueError(f"floor: no {dtype} ceiling on {machine.device}, only {', '.join(rates)}")
    compute_ms = flops / (rates[dtype] * 1e12) * 1e3
    memory_ms = nbytes / (machine.ceilings.memory_gbps * 1e9) * 1e3
    by_arithmetic = compute_ms >= memory_ms
    text = (
        f"{flops_text} = {flops / 1e12:.4g} TFLOP at {rates[dtype]:.4g} TFLOP/s ({dtype}) = "
        f"{compute_ms:.4g} ms; {bytes_text} = {nbytes / 1e9:.4g} GB at "
        f"{machine.ceilings.memory_gbps:.4g} GB/s = {memory_ms:.4g} ms; "
        f"bound by {'arithmetic' if by_arithmetic else 'memory'}"
    )
    ceiling = dtype if by_arithmetic else "memory"
    return Floor(ms=max(compute_ms, memory_ms), arithmetic=text, ceiling=ceiling)


def survey(probe: Probe) -> Machine:
    """Collect the facts and measure the ceilings (a few seconds)."""
    cuda = probe.device == "cuda"
    return Machine(
        device=probe.device,
        name=torch.cuda.get_device_name() if cuda else f"{_cpu_name()} ({os.cpu_count()} CPUs)",
        facts=_facts(probe.device),
        ceilings=measure_ceilings(probe),
    )


def measure_ceilings(probe: Probe) -> Ceilings:
    """Measure the machine's best rates now (a few seconds, a few GiB on a GPU)."""
    ceilings = _cuda_ceilings(probe) if probe.device == "cuda" else _cpu_ceilings(probe)
    probe.settle()
    return ceilings


def better_of(before: Ceilings, after: Ceilings) -> Ceilings:
    """The higher matrix-product and memory rates of two measurements; links as in ``before``."""
    return replace(
        before,
        matmul_tflops={k: max(v, after.matmul_tflops[k]) for k, v in before.matmul_tflops.items()},
        memory_gbps=max(before.memory_gbps, after.memory_gbps),
    )


def drift(before: Ceilings, after: Ceilings) -> dict[str, float]:
    """Relative change by ``Floor.ceiling``: -0.1 is a rate that fell by a tenth."""
    moved = {k: after.matmul_tflops[k] / rate - 1 for k, rate in before.matmul_tflops.items()}
    return {**moved, "memory": after.memory_gbps / before.memory_gbps - 1}


def _best_seconds(probe: Probe, call: Callable[[], Any]) -> float:
    # The best of several, not the median: a floor must not be raised by someone else's load.
    for _ in range(_WARMUP):
        probe.time_ms(call)
    return min(probe.time_ms(call) for _ in range(_REPEATS)) / 1e3


def _matmul_tflops(probe: Probe, extent: int, dtype: torch.dtype) -> float:
    # Random operands: zeros draw less power and run faster than real data.
    a, b = (torch.randn(extent, extent, device=probe.device).to(dtype) for _ in range(2))
    return 2 * extent**3 / _best_seconds(probe, lambda: a @ b) / 1e12


def _copy_gbps(probe: Probe, nbytes: int) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=probe.device)
    target = torch.empty_like(source)
    return 2 * nbytes / _best_seconds(probe, lambda: target.copy_(source)) / 1e9


def _cpu_ceilings(probe: Probe) -> Ceilings:
    return Ceilings(
        matmul_tflops={"float32": _matmul_tflops(probe, 2048, torch.float32)},
        memory_gbps=_copy_gbps(probe, 256 * 2**20),
    )


def _cuda_ceilings(probe: Probe) -> Ceilings:
    matmul = {
        "bfloat16": _matmul_tflops(probe, 8192, torch.bfloat16),
        "float32": _matmul_tflops(probe, 4096, torch.float32),
    }
    memory = _copy_gbps(probe, 2 * 2**30)
    nbytes = 2**30
    hosts = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def up() -> None:
        devices[0].copy_(hosts[0], non_blocking=True)

    def down() -> None:
        hosts[1].copy_(devices[1], non_blocking=True)

    def both() -> None:
        here = torch.cuda.current_stream()
        for stream, copy in zip(streams, (up, down), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                copy()
        for stream in streams:
            here.wait_stream(stream)

    up_s, down_s, both_s = (_best_seconds(probe, copy) for copy in (up, down, both))
    return Ceilings(
        matmul_tflops=matmul,
        memory_gbps=memory,
        host_to_device_gbps=nbytes / up_s / 1e9,
        device_to_host_gbps=nbytes / down_s / 1e9,
        both_ways_gbps=nbytes / both_s / 1e9,
    )


def _facts(device: Device) -> dict[str, str | int | float]:
    facts: dict[str, str | int | float] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        **_git_facts(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = properties.name
        facts["gpu_memory_bytes"] = properties.total_memory
        facts["driver"] = _driver_version()
        facts["cuda"] = str(torch.version.cuda)
    return facts


def _triton_version() -> str:
    try:
        import triton
    except ModuleNotFoundError:
        return "not installed"
    return str(triton.__version__)


def _output_of(*command: str) -> str | None:
    """Standard output of a command; None if it is missing or fails."""
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _git_facts() -> dict[str, str]:
    status = _output_of("git", "status", "--porcelain", "--", ":!tests/benchmarks/results")
    if status is None:
        return {"git_commit": "not a git checkout", "git_dirty": "unknown"}
    commit = _output_of("git", "rev-parse", "--verify", "HEAD")
    return {"git_commit": commit or "no commit yet", "git_dirty": "yes" if status else "no"}


def _driver_version() -> str:
    answer = _output_of(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
    )
    return answer or "unknown (no answer from nvidia-smi)"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
