"""Ranks of one benchmark: how they start, what they agree on, and what they say."""

import argparse
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.machine import Machine
from tests.benchmarks.probes import Device, Probe
from tests.benchmarks.training import heading


def start_ranks(device: Device, hang_seconds: int) -> None:
    """Join the process group that torchrun has announced, each rank with a GPU of its own.

    Args:
        device: chosen before.
        hang_seconds: after which ranks that wait for one that failed end as well.
    """
    own = None
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        own = torch.device(device, torch.cuda.current_device())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        device_id=own,
        timeout=timedelta(seconds=hang_seconds),
    )


def ranks_heading(
    module: str, options: argparse.Namespace, arguments: Sequence[str], machine: Machine
) -> dict[str, Any]:
    """What a record of several ranks begins with, what they were started with included.

    Args:
        module: of this package.
        options: see ``training.heading``.
        arguments: as the module was given them.
        machine: measured before.
    """
    ranks = dist.get_world_size()
    start = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    return {
        **heading(module, options, arguments, [], machine),
        "command": shlex.join([*start, "-m", f"tests.benchmarks.{module}", *arguments]),
        "ranks": ranks,
        "ceilings": asdict(machine.ceilings),
    }


def highest(value: float) -> float:
    """The largest of all ranks'; asked over the hosts, whatever the devices are waiting for."""
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


@dataclass(frozen=True)
class Peak:
    """Memory of one call.

    Attributes:
        above: bytes beyond what lay on the device before it, of the fullest rank.
        reserved: bytes that the allocator held, of the rank where they were most; 0 on a CPU.
    """

    above: int
    reserved: int


def peak_of(probe: Probe, call: Callable[[], Any]) -> Peak | None:
    """The peak of a call that all ranks make; None where it did not fit on one of them."""
    try:
        memory = probe.memory(call)
    except torch.OutOfMemoryError:
        memory = None
    if highest(memory is None):
        return None
    assert memory is not None
    before = memory.resident if probe.device == "cuda" else 0
    return Peak(int(highest(memory.peak - before)), int(highest(memory.reserved or 0)))


@dataclass(frozen=True)
class Progress:
    """Time since the ranks began.

    Attributes:
        began: ``time.monotonic()`` then.
        limit: seconds after which no round begins; None: none.
    """

    began: float
    limit: float | None = None

    def say(self, text: str) -> None:
        """Print a line, on the first rank."""
        if dist.get_rank() == 0:
            print(f"[{time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def expired(self) -> bool:
        """Whether time is up on any rank. Collective."""
        return self.limit is not None and highest(time.monotonic() - self.began) > self.limit
