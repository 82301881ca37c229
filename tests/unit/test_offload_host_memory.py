"""Host memory: who holds how much, that slabs are exact, where pages go, places in a slab."""

import os
import random
import resource
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from components.offload import claim as claiming
from components.offload import slabs
from components.offload.accountant import HostAccountant, HostBudgetError, host_accountant
from components.offload.arena import Arena, aligned
from components.offload.claim import Request, claim, refuse_too_much
from components.offload.slabs import PAGE, PinningRefused, Slab, cpus_of_pci_device, pinned_bytes

CPU = torch.device("cpu")
GIB = 2**30
KEY = "components.a"


def test_the_account_adds_up_what_owners_hold_and_forgets_what_they_give_back() -> None:
    account = HostAccountant(100)
    account.reserve("components.a", 30, 40)
    account.reserve("components.b", 50)
    assert (account.payload, account.pinned) == (80, 90)
    assert {owner: h.pinned for owner, h in account.holdings.items()} == {
        "components.a": 40,
        "components.b": 50,
    }
    account.release("components.a")
    account.release("components.a")
    assert (account.payload, account.pinned) == (50, 50)


def test_more_than_the_limit_is_refused_with_the_figures_of_all_owners() -> None:
    account = HostAccountant(10 * GIB)
    account.reserve("components.a", 7 * GIB)
    said = r"components\.b: 4\.00 GiB .* may have 10\.00 GiB, of which components\.a 7\.00 GiB"
    with pytest.raises(HostBudgetError, match=said):
        account.reserve("components.b", 4 * GIB)
    assert account.pinned == 7 * GIB
    account.reserve("components.b", 3 * GIB)
    assert account.pinned == 10 * GIB


def test_an_owner_reserves_once() -> None:
    account = HostAccountant()
    account.reserve("components.a", 1)
    with pytest.raises(ValueError, match="components.a holds host memory already"):
        account.reserve("components.a", 1)


@pytest.mark.parametrize("payload", [1, PAGE - 1, PAGE, PAGE + 1, 5_000_000])
def test_a_slab_takes_no_more_than_the_last_page(payload: int) -> None:
    slab = Slab(payload, CPU)
    assert slab.payload == payload
    assert payload <= slab.pinned < payload + PAGE
    assert slab.pinned == pinned_bytes(payload)
    assert slab.view(0, payload).shape == (payload,)
    assert not slab.view(0, payload).any()
    slab.close()


def test_boundaries_of_a_page_or_more_are_pinned_within_two_percent() -> None:
    for tokens in (1, 333, 32_768, 131_071):
        payload = 45 * aligned(tokens * 16_384 * 2)
        assert pinned_bytes(payload) <= 1.02 * 45 * tokens * 16_384 * 2


def test_views_of_a_slab_share_its_memory() -> None:
    slab = Slab(1000, CPU)
    slab.view(100, 50).fill_(7)
    assert slab.view(0, 1000).sum() == 350
    assert slab.view(149, 2).tolist() == [7, 0]


def test_touching_from_chosen_cores_leaves_everybodys_affinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, asked = os.sched_getaffinity(0), []
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cpus: asked.append((who, set(cpus))))
    monkeypatch.setattr(slabs, "_TOUCH_BYTES", PAGE)
    one = {min(before)}
    slab = Slab(3 * PAGE, CPU, one)
    assert not slab.view(0, 3 * PAGE).any()
    assert asked and all(each == (0, one) for each in asked)
    assert os.sched_getaffinity(0) == before


def fake_cuda(monkeypatch: pytest.MonkeyPatch, answer: int) -> list[tuple[str, int]]:
    """CUDA's part in pinning; the calls made to it."""
    calls = []

    def register(address: int, nbytes: int, flags: int) -> int:
        calls.append(("register", nbytes))
        return answer

    def unregister(address: int) -> int:
        calls.append(("unregister", address))
        return 0

    cudart = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaGetErrorString=lambda error: "out of memory",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    return calls


def test_a_slab_for_a_gpu_is_registered_whole_and_unregistered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = fake_cuda(monkeypatch, 0)
    slab = Slab(PAGE + 1, torch.device("cuda", 0))
    address = slab.view(0, 1).data_ptr()
    slab.close()
    slab.close()
    assert calls == [("register", 2 * PAGE), ("unregister", address)]


def test_what_the_system_says_to_pinning_is_told_with_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = fake_cuda(monkeypatch, 2)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (2**29, 2**30))
    said = (
        r"refused to pin 0\.03 GiB of host memory: out of memory \(cudaHostRegister, error 2\); "
        r"limit on locked memory \(ulimit -l\): 0\.50 GiB"
    )
    with pytest.raises(PinningRefused, match=said):
        Slab(2**25, torch.device("cuda", 0))
    assert [name for name, _ in calls] == ["register"]


def pci_device(root: Path, node: str, cores: str) -> None:
    device = root / "bus/pci/devices/0000:4b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    folder = root / "devices/system/node/node1"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cores}\n")


def test_cores_near_a_device_are_those_of_its_node_that_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "SYS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {1, 5, 6, 40})
    pci_device(tmp_path, "1", "4-7,36-39,40")
    assert cpus_of_pci_device("0000:4b:00.0") == {5, 6, 40}
    assert cpus_of_pci_device("0000:4c:00.0") == set()


@pytest.mark.parametrize("node", ["-1", "3"])
def test_an_unknown_node_means_no_cores(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "SYS", tmp_path)
    pci_device(tmp_path, node, "0-127")
    assert cpus_of_pci_device("0000:4b:00.0") == set()


def test_places_do_not_overlap_and_come_back_whole() -> None:
    arena = Arena(Slab(100 * aligned(1), CPU))
    draw, taken = random.Random(0), []
    for step in range(2000):
        if taken and (draw.random() < 0.5 or step > 1900):
            arena.give(taken.pop(draw.randrange(len(taken))))
        else:
            place = arena.take(draw.randint(1, 3000))
            if place is not None:
                taken.append(place)
        edges = sorted((p.start, p.start + aligned(p.nbytes)) for p in taken)
        assert all(end <= start for (_, end), (start, _) in zip(edges, edges[1:], strict=False))
        assert arena.free == 100 * aligned(1) - sum(aligned(p.nbytes) for p in taken)
    for place in taken:
        arena.give(place)
    assert arena.take(100 * aligned(1)) is not None
    assert arena.take(1) is None


def test_a_place_from_before_a_clear_gives_nothing_back() -> None:
    arena = Arena(Slab(1024, CPU))
    old = arena.take(1024)
    assert old is not None
    arena.clear()
    assert arena.take(512) is not None
    arena.give(old)
    assert arena.free == 512


def request(host: str, needed: int, available: int = 1000, budget: int | None = None) -> Request:
    return Request(host, 2000 * GIB, available * GIB, needed * GIB, budget and budget * GIB)


def test_ranks_of_one_machine_are_judged_together() -> None:
    refuse_too_much(KEY, [request("a", 470), request("a", 470), request("b", 940)])
    said = (
        r"components\.a\.host_budget_gib: 2 ranks would pin 480\.00 GiB each, but machine a has "
        r"950\.00 GiB to spare; at most 475\.0"
    )
    with pytest.raises(HostBudgetError, match=said):
        refuse_too_much(KEY, [request("a", 480), request("b", 10), request("a", 480)])


def test_a_budget_above_the_whole_machine_is_refused_even_if_little_is_needed() -> None:
    said = r"host_budget_gib: 1500 on each of 2 ranks is more than the 2000\.00 GiB .* at most 1000"
    with pytest.raises(HostBudgetError, match=said):
        refuse_too_much(KEY, [request("a", 1, budget=1500)] * 2)


def test_a_claim_is_on_the_account_until_it_is_released() -> None:
    slab = claim(KEY, 5000, None, CPU)
    holding = host_accountant().holdings[KEY]
    assert (holding.payload, holding.pinned) == (5000, pinned_bytes(5000))
    slab.close()
    host_accountant().release(KEY)
    assert KEY not in host_accountant().holdings


def test_a_refusal_by_the_system_is_told_by_all_ranks_and_leaves_no_reservation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 is refused; this rank, 0, was not, and must not go on."""
    closed = []
    monkeypatch.setattr(Slab, "close", lambda slab: closed.append(slab))
    monkeypatch.setattr(
        claiming, "gather", lambda value: [value] if isinstance(value, Request) else [value, "no"]
    )
    with pytest.raises(PinningRefused, match=r"components\.a\.host_budget_gib: on rank 1 no\. Use"):
        claim(KEY, 5000, None, CPU)
    assert len(closed) == 1
    assert KEY not in host_accountant().holdings


def test_a_refusal_of_this_rank_carries_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PinningRefused("the system refused to pin 3.00 GiB of host memory: error 2")

    monkeypatch.setattr(claiming, "Slab", refuse)
    with pytest.raises(PinningRefused, match=r"on rank 0 the system refused to pin 3\.00 GiB"):
        claim(KEY, 5000, None, CPU)
    assert KEY not in host_accountant().holdings
