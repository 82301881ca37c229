"""What all ranks decide together about streamed optimizers: share, threads, memory, bad steps."""

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from components.core.host import memory_total
from components.offload import cores
from components.offload.accountant import HostBudgetError, host_accountant
from components.offload.cores import Cores, share, threads
from components.streamed_adamw.engine import Engine
from components.streamed_adamw.split import Measured
from components.titan import streamed_optimizer
from components.titan.story import STORY
from components.titan.streamed_optimizer import NonFiniteGradient, StreamedOptimizers
from tests.unit.streamed_parts import OWNER, backward, config, parts, streamed

CPU = torch.device("cpu")
KEY = f"{OWNER}.cpu_threads"
INFINITE = float("inf")


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    yield
    held = OWNER in host_accountant().holdings
    host_accountant().release(OWNER)
    assert not held


def spoil(part: nn.Module) -> None:
    for weight in part.parameters():
        if weight.grad is not None:
            weight.grad.fill_(float("nan"))


def test_a_broken_gradient_is_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight with shards on both ranks, and of weights that the other rank alone has."""
    model_parts = parts()
    container = streamed(model_parts)
    backward(model_parts, 0)
    model_parts[1].c.weight.grad[1, 2] = float("nan")
    other = {"a.weight": True, "c.weight": False, "e.weight": True, "f.weight": False}
    monkeypatch.setattr(streamed_optimizer, "gather", lambda mine: [mine, other])
    named = r"3 of 8 weights \(a\.weight, c\.weight, e\.weight\) hold"
    with pytest.raises(NonFiniteGradient, match=named):
        container.step()
    container.close()


def test_clipping_is_told_where_it_broke_everything() -> None:
    model_parts = parts()
    container = streamed(model_parts)
    backward(model_parts, 0)
    for part in model_parts:
        spoil(part)
    expected = r"gradients of all 6 weights \(clipping spreads one NaN over all of them\) hold"
    with pytest.raises(NonFiniteGradient, match=expected):
        container.step()
    container.close()


def test_an_empty_gradient_beside_others_is_no_problem() -> None:
    """A rank may hold nothing of a weight."""
    model_parts = parts()
    model_parts[1].register_parameter("empty", nn.Parameter(torch.ones(0, 4)))
    container = streamed(model_parts)
    backward(model_parts, 0)
    model_parts[1].empty.grad = torch.ones(0, 4)
    before = model_parts[0].b.weight.detach().clone()
    container.step()
    assert container.skipped == 0 and not torch.equal(model_parts[0].b.weight, before)
    container.close()


def test_a_budget_of_exactly_what_is_needed_is_enough() -> None:
    container = streamed(parts())
    needed = container.pinned
    container.close()
    container = streamed(parts(), host_budget=needed)
    assert container.pinned == needed
    container.close()
    with pytest.raises(HostBudgetError, match="do not hold the optimizer state"):
        streamed(parts(), host_budget=needed - 1)


def test_a_budget_beyond_the_machine_is_no_reason_to_refuse() -> None:
    container = streamed(parts(), host_budget=2 * memory_total())
    assert 0 < container.pinned < memory_total()
    container.close()


def test_building_leaves_the_settings_as_they_are() -> None:
    settings = config(split="auto", cpu_threads=None)
    before = copy.deepcopy(settings)
    StreamedOptimizers(settings, model_parts=parts()).close()
    assert settings == before


def test_all_ranks_use_the_mean_of_their_shares(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Engine, "measure", lambda self: Measured(1000, 1.0, 3.0, 0.75, 0.25))
    # A rank without values has no say.
    others = [[Measured(9, 1.0, 1.0, 0.6, 1.0)], [Measured(0, 0.0, 0.0, 0.0, 0.0)], []]
    monkeypatch.setattr(
        streamed_optimizer, "gather", lambda m: [m, *others] if isinstance(m, list) else [m]
    )
    model_parts = [nn.Linear(1000, 1)]
    with caplog.at_level(logging.INFO, STORY):
        container = streamed(model_parts, split="auto")
    (told,) = [r.getMessage() for r in caplog.records if ".split" in r.getMessage()]
    assert f"{OWNER}.split: auto is 0.625, the mean of all ranks" in told
    assert "1,000 parameters took 1 s streamed, 3 s by the CPU and 0.75 s" in told
    measured = [each.share for each in container]
    container.close()
    same = streamed([nn.Linear(1000, 1)], split=0.625)
    assert [each.share for each in same] == measured == [pytest.approx(0.625, abs=0.1)]
    same.close()


def test_a_share_needs_a_thread_that_was_started() -> None:
    container = streamed(parts(), split=0)
    (optimizer, _) = container.optimizers
    with pytest.raises(ValueError, match="share is 0.5; it must be 0 where split was 0"):
        optimizer.set_share(0.5)
    with pytest.raises(ValueError, match="share is nan; it must be a number from 0 to 1"):
        optimizer.set_share(float("nan"))
    optimizer.set_share(0)
    container.close()


def rank(host: str, near: range, quota: float = INFINITE) -> Cores:
    return Cores(host, frozenset(range(64)), frozenset(near), quota)


def test_ranks_share_the_cores_near_their_devices() -> None:
    left, right = range(0, 32), range(32, 64)
    ranks = [rank("a", left), rank("a", left), rank("a", left), rank("a", right), rank("b", left)]
    assert [share(ranks, number) for number in range(5)] == [10, 10, 10, 32, 32]


def test_a_quota_is_for_all_ranks_of_a_machine() -> None:
    ranks = [rank("a", range(32), 9.5), rank("a", range(32, 64), 9.5), rank("b", range(32), 0.5)]
    assert [share(ranks, number) for number in range(3)] == [4, 4, 1]


def test_threads_are_this_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = rank("a", range(12))
    monkeypatch.setattr(cores, "cores_of", lambda device: mine)
    monkeypatch.setattr(cores, "gather", lambda value: [rank("b", range(7)), value, value])
    assert threads(KEY, None, CPU) == 6
    assert threads(KEY, 64, CPU) == 64


def test_more_threads_than_any_machine_has_cores_are_refused_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = Cores("small", frozenset(range(8)), frozenset(range(4)), 3.5)
    monkeypatch.setattr(cores, "gather", lambda value: [few, rank("a", range(8))])
    expected = rf"{KEY}: 4 is more than the 3 cores .* on machine small; use 1 to 3, or null"
    with pytest.raises(ValueError, match=expected):
        threads(KEY, 4, CPU)
    assert threads(KEY, 3, CPU) == 3
    with pytest.raises(ValueError, match=expected):
        streamed(parts(), cpu_threads=4)


def test_where_nothing_is_known_of_the_device_all_allowed_cores_are_near() -> None:
    found = cores.cores_of(CPU)
    assert found.near == found.allowed and found.most >= 1
