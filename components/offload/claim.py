"""Pin host memory on every rank, or refuse on every rank: never on some."""

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from components.core.host import memory_available, memory_total
from components.offload.accountant import HostBudgetError, gib, host_accountant
from components.offload.slabs import PinningRefused, Slab, cpus_near, pinned_bytes

SPARE = 0.05
"""Part of a machine's free memory that is never pinned: the system kills processes without it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What one rank asks of its machine.

    Attributes:
        host: name of the machine.
        total: bytes of memory that the rank may use at all.
        available: bytes free on the machine before any rank pins.
        needed: bytes to be pinned.
        budget: bytes that the settings allow, at least ``needed``; None: as many as needed.
    """

    host: str
    total: int
    available: int
    needed: int
    budget: int | None = None


def claim(owner: str, payload: int, budget: int | None, device: torch.device) -> Slab:
    """Reserve and pin host memory. Collective: every rank calls it.

    Args:
        owner: dotted key of the component.
        payload: bytes to be stored on this rank, at least 1.
        budget: bytes that ``owner``.host_budget_gib allows, where these will be filled: so many
            are refused that no machine has. None from an owner whose budget is a limit alone, which
            it compares with what it needs itself, and where there is none.
        device: what copies from and to it.

    Raises:
        HostBudgetError: some machine has too little memory; on all ranks.
        PinningRefused: the system refused some rank; on all ranks.
    """
    account = host_accountant()
    mine = Request(
        socket.gethostname(), memory_total(), memory_available(), pinned_bytes(payload), budget
    )
    requests = gather(mine)
    refuse_too_much(owner, requests)
    share = int((1 - SPARE) * mine.available) // sum(each.host == mine.host for each in requests)
    if account.limit is None:
        # Whoever comes later shares what this machine had when the first one came.
        account.limit = max(share, mine.needed)
    slab, problem = None, ""
    try:
        account.reserve(owner, payload, mine.needed)
        slab = Slab(payload, device, cpus_near(device))
    except Exception as error:
        # Whatever it is, the other ranks are waiting to hear of it.
        problem = str(error) or repr(error)
    refused = {rank: text for rank, text in enumerate(gather(problem)) if text}
    if refused or slab is None:
        if slab is not None:
            slab.close()
        if slab is not None or owner in account.holdings:
            account.release(owner)
        raise PinningRefused(_refusal(owner, refused))
    return slab


def refuse_too_much(owner: str, requests: Sequence[Request]) -> None:
    """Compare what the ranks of each machine ask for together with what it has.

    Args:
        owner: dotted key of the component.
        requests: of all ranks.

    Raises:
        HostBudgetError: with the figures.
    """
    ranks = Counter(request.host for request in requests)
    for host, count in ranks.items():
        here = [request for request in requests if request.host == host]
        _refuse(owner, host, count, here)


def _refuse(owner: str, host: str, count: int, here: Sequence[Request]) -> None:
    machine = "this machine" if host == socket.gethostname() else f"machine {host}"
    total = min(request.total for request in here)
    available = int((1 - SPARE) * min(request.available for request in here))
    budget = max(request.budget or 0 for request in here)
    needed = max(request.needed for request in here)
    if budget * count > total:
        raise HostBudgetError(
            f"{owner}.host_budget_gib: {budget / 2**30:g} on each of {count} "
            f"rank{'s' * (count > 1)} is more than the {gib(total)} that {machine} has; "
            f"at most {total / count / 2**30:.1f}"
        )
    if sum(request.needed for request in here) > available:
        raise HostBudgetError(
            f"{owner}.host_budget_gib: {count} rank{'s' * (count > 1)} would pin {gib(needed)} "
            f"each, but {machine} has {gib(available)} to spare; "
            f"at most {available / count / 2**30:.1f}, or fewer ranks per machine"
        )


def gather(value: T) -> list[T]:
    """What every rank says, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def _refusal(owner: str, refused: dict[int, str]) -> str:
    ranks = ", ".join(map(str, refused))
    first = next(iter(refused.values()), "")
    return (
        f"{owner}.host_budget_gib: on rank{'s' * (len(refused) > 1)} {ranks} {first}. "
        "Use a smaller budget, or raise the limit on locked memory (ulimit -l, memlock)"
    )
