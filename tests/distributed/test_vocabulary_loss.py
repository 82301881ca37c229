"""The vocabulary loss on rings of ranks: every schedule gives what one process gives in float64."""

from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from components.vocabulary.fused import fused
from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.move_activations import move_activations
from components.vocabulary.move_weights import move_weights
from components.vocabulary.strips import strip_buffer
from tests.distributed.spawn import run_ranks
from tests.unit.vocabulary_support import (
    Answer,
    Meter,
    Problem,
    answer,
    error,
    make_problem,
    small_blocks,
)

pytestmark = pytest.mark.distributed

Schedule = Callable[..., Answer]
CPU = torch.device("cpu")


def by_fused(
    problem: Problem,
    group: dist.ProcessGroup,
    rank: int,
    dtype: torch.dtype,
    rows: int,
    device: torch.device = CPU,
) -> Answer:
    """``rank`` says whose tokens; the answer is on the CPU."""
    x, w = problem.hidden[rank].to(device, dtype), problem.shard(dist.get_rank(group), dtype)
    w, targets = w.to(device), problem.targets[rank].to(device)
    dw, scale = torch.zeros_like(w, dtype=torch.float32), torch.tensor(problem.scale, device=device)
    arguments = x, w, targets, problem.layout, group
    loss, dx = fused(*arguments, scale=scale, rows=rows, dw=dw)
    assert dx is not None
    alone, nothing = fused(*arguments, scale=scale, rows=rows, dw=None, wants_dx=False)
    assert torch.equal(alone, loss) and nothing is None
    return Answer(loss.cpu(), dx.cpu(), dw.cpu(), None, None)


def by_moving(move: Callable) -> Schedule:
    def run(
        problem: Problem,
        group: dist.ProcessGroup,
        rank: int,
        dtype: torch.dtype,
        rows: int,
        device: torch.device = CPU,
    ) -> Answer:
        x = problem.hidden[rank].to(device, dtype).requires_grad_()
        w = problem.shard(dist.get_rank(group), dtype).to(device)
        dw, targets = torch.zeros_like(w, dtype=torch.float32), problem.targets[rank].to(device)
        log_p, entropy = move(x, w, targets, problem.layout, group, rows=rows, dw=dw)
        loss = -log_p.sum()
        (loss * problem.scale).backward()
        assert x.grad is not None
        return Answer(
            loss.detach().cpu(), x.grad.cpu(), dw.cpu(), log_p.detach().cpu(), entropy.cpu()
        )

    return run


SCHEDULES: dict[str, Schedule] = {
    "fused": by_fused,
    "move_weights": by_moving(move_weights),
    "move_activations": by_moving(move_activations),
}


def problems(ranks: int) -> dict[str, Problem]:
    """What may go wrong with several ranks, for rings of all of them."""
    ring = VocabularyLayout(41, ranks, ranks)
    some = [9, 14, 3, 6][:ranks]
    return {
        "even": make_problem(VocabularyLayout(40, ranks, ranks), [12] * ranks, ignored=[0] * ranks),
        "uneven vocabulary and tokens": make_problem(ring, some, seed=1),
        "an empty shard": make_problem(VocabularyLayout(ranks + 1, ranks, ranks), some, seed=2),
        "fewer entries than ranks": make_problem(VocabularyLayout(1, ranks, ranks), some, seed=3),
        "a rank without target": make_problem(ring, some, ignored=[0.2, 1.1, 0, 0.5][:ranks]),
        "a rank without token": make_problem(ring, [0, *some[1:]], seed=4),
        "no target anywhere": make_problem(ring, some, ignored=[1.1] * ranks),
        "a shard of -inf": make_problem(ring, some, minus_infinity=1, seed=5),
    }


def two_rings() -> Problem:
    """Four FSDP ranks, of which every second one's shard belongs to a ring rank."""
    return make_problem(VocabularyLayout(42, 4, 2), [9, 4, 5, 7], seed=6)


def check(
    name: str,
    problem: Problem,
    ring: list[int],
    group: dist.ProcessGroup,
    device: torch.device = CPU,
) -> None:
    """This rank's results with every schedule.

    Args:
        name: of the problem.
        problem: with tokens for the ranks ``ring`` at least.
        ring: numbers of the problem's ranks that are in ``group``, in its order.
        group: this rank's.
        device: where to compute.
    """
    q = dist.get_rank(group)
    expected = answer(problem, ring, q)
    for schedule, run in SCHEDULES.items():
        for dtype, bound in ((torch.float32, 3e-6), (torch.bfloat16, 3e-2)):
            found = run(problem, group, ring[q], dtype, 4 * len(ring), device)
            assert found.dx.dtype == dtype
            for field in fields(Answer):
                one, other = getattr(found, field.name), getattr(expected, field.name)
                if one is not None:
                    wrong = error(one, other)
                    assert wrong < bound, f"{schedule}, {name}, {dtype}: {field.name} {wrong:.1e}"


def check_budget(group: dist.ProcessGroup) -> None:
    """One strip of rows x v, and nothing else of that size: neither N x v nor N x V."""
    ranks, tokens, rows = dist.get_world_size(group), 24, 8
    layout = VocabularyLayout(80 * ranks, ranks, ranks)
    problem = make_problem(layout, [tokens] * ranks, hidden=2)
    strip = strip_buffer(rows, layout.widest, torch.empty(0)).untyped_storage().nbytes() // 4
    for schedule, run in SCHEDULES.items():
        meter = Meter(large=rows * layout.widest)
        with small_blocks(layout.widest), meter:
            run(problem, group, dist.get_rank(group), torch.float32, rows)
        assert meter.largest == strip and meter.most == 1, f"{schedule}: {meter.__dict__}"


def check_sums(pair: dist.ProcessGroup) -> None:
    """What two ranks add to dX, and to dW, cancels but for a part that bfloat16 would round away.

    All logits are 0, so every softmax is 1/4. The first column of ``weight`` makes dX, the second
    of the hidden states dW.
    """
    small = 2.0**-10
    weight = torch.tensor([[1.0, 0], [small, 0], [0.5, 0], [0.5, 0]]).double()
    hidden = torch.tensor([[[0, 1.0], [0, small]], [[0, -0.5], [0, -0.5]]]).double()
    targets = torch.full((2, 2), 2)
    problem = Problem(VocabularyLayout(4, 2, 2), tuple(hidden), tuple(targets), weight)
    q = dist.get_rank(pair)
    for schedule, run in SCHEDULES.items():
        found = run(problem, pair, q, torch.bfloat16, 2)
        assert (found.dx[:, 0] == small / 4 * problem.scale).all(), schedule
        shares = torch.tensor([0.25, 0.25] if q == 0 else [-0.75, 0.25])
        assert torch.equal(found.dw[:, 1], shares * small * problem.scale), schedule


def check_refusal(group: dist.ProcessGroup) -> None:
    """A target that does not exist on one rank ends the call on all of them, with its rank."""
    problem = make_problem(VocabularyLayout(10, *[dist.get_world_size(group)] * 2), [4, 4, 4, 4])
    problem.targets[1][2] = 10
    for run in SCHEDULES.values():
        with pytest.raises(ValueError, match="1 targets of rank.s. 1 of the ring are no entries"):
            run(problem, group, dist.get_rank(group), torch.float32, 8)
    with pytest.raises(ValueError, match="strips of 5 rows; legal: a positive multiple of"):
        by_fused(problem, group, dist.get_rank(group), torch.float32, 5)


def rank_of_four() -> None:
    """One rank of a ring of four, and at the same time of one of two rings of two."""
    # Among other things, fills new memory with nan: nothing may be read that was not written.
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    four, pairs = [0, 1, 2, 3], [[0, 1], [2, 3]]
    groups = [dist.new_group(pair) for pair in pairs]
    world, pair, group = dist.group.WORLD, pairs[rank // 2], groups[rank // 2]
    assert world is not None
    for name, problem in problems(4).items():
        check(name, problem, four, world)
    for name, problem in problems(2).items():
        check(name, problem, [0, 1], group)
    check("two rings of one vocabulary", two_rings(), pair, group)
    check_sums(group)
    for each in (world, group):
        check_budget(each)
        check_refusal(each)
    dist.destroy_process_group()


def test_rings_of_two_and_four_equal_one_process(tmp_path: Path) -> None:
    run_ranks(rank_of_four, 4, tmp_path)
