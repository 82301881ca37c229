"""Ranks of one benchmark: how they start, and what they agree on."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.benchmarks.probes import Device


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


def highest(value: float) -> float:
    """The largest of all ranks'; asked over the hosts, whatever the devices are waiting for."""
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)
