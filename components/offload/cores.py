"""How many threads a rank may use beside the other ranks of its machine."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from components.core.host import core_quota
from components.offload.claim import gather
from components.offload.slabs import cpus_near


@dataclass(frozen=True)
class Cores:
    """What one rank may compute on.

    Attributes:
        host: name of the machine.
        allowed: cores that the rank may use.
        near: those of them that are near its device; all of them where that is not known.
        quota: cores' worth of time of all ranks of the machine together.
    """

    host: str
    allowed: frozenset[int]
    near: frozenset[int]
    quota: float

    @property
    def most(self) -> int:
        """Threads that can run at once."""
        return max(1, int(min(len(self.allowed), self.quota)))


def cores_of(device: torch.device) -> Cores:
    """What this rank may compute on for a device."""
    allowed = frozenset(os.sched_getaffinity(0))
    near = frozenset(cpus_near(device))
    return Cores(socket.gethostname(), allowed, near or allowed, core_quota())


def share(ranks: Sequence[Cores], rank: int) -> int:
    """Threads for a rank: its near cores over the ranks that are near them as well, at least 1.

    Args:
        ranks: what every rank may compute on.
        rank: number of the rank.
    """
    mine = ranks[rank]
    here = [each for each in ranks if each.host == mine.host]
    sharing = sum(bool(each.near & mine.near) for each in here)
    return max(1, int(min(len(mine.near) // sharing, mine.quota / len(here))))


def threads(key: str, wanted: int | None, device: torch.device) -> int:
    """Threads of this rank's arithmetic on the CPU. Collective.

    Args:
        key: dotted key of ``wanted``, for messages.
        wanted: as many; None: this rank's share of the cores near its device.
        device: that the threads work for.

    Raises:
        ValueError: some machine has fewer cores; on all ranks.
    """
    mine = cores_of(device)
    ranks = gather(mine)
    if wanted is None:
        return share(ranks, ranks.index(mine))
    least = min(ranks, key=lambda each: each.most)
    if wanted > least.most:
        raise ValueError(
            f"{key}: {wanted} is more than the {least.most} core{'s' * (least.most > 1)} that a "
            f"rank may use on machine {least.host}; use 1 to {least.most}, or null for its share "
            "of them"
        )
    return wanted
