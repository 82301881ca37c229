"""What the Hopper kernel of the indexer computes, without a GPU; see ``gluon_on_cpu``."""

import pytest
import torch

from kernels.indexer import gluon_scores
from kernels.indexer.windows import GROUP, Window, plan, workspaces
from tests.unit import gluon_on_cpu
from tests.unit.indexer_support import SCALE, Problem, make_problem, rounded

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    kernel = gluon_on_cpu.Launched(gluon_scores._scores_kernel, gluon_scores)
    monkeypatch.setattr(gluon_scores, "_scores_kernel", kernel)
    monkeypatch.setattr(gluon_scores, "_descriptor", gluon_on_cpu.Descriptor)
    monkeypatch.setattr(gluon_scores, "_SEGMENT", 256)


def check(
    problem: Problem,
    first: torch.Tensor,
    end: torch.Tensor,
    windows: tuple[Window, ...],
    in_fp8: bool = False,
) -> None:
    """Every score that may be asked for, and the best of each group with one, window by window."""
    want, factors = problem.scores().float(), None
    if in_fp8:
        problem, factors = rounded(problem)
    operands = problem.queries, problem.weights, problem.keys, first, end
    for window, space in workspaces(windows, 4, torch.device("cpu")):
        space.scores.fill_(INF)
        space.best.fill_(INF)
        gluon_scores.write_scores(*operands, space, window, SCALE, factors)
        rows = slice(window.q0, window.q1)
        pools = torch.arange(window.p0, window.p0 + window.width)
        allowed = (pools >= first[rows, None]) & (pools < end[rows, None])
        known = want[rows, window.p0 : window.p0 + window.width]
        here = torch.full(allowed.shape, -INF)
        here[:, : known.shape[1]] = known
        here[~allowed] = -INF
        best, seen = (x.unflatten(1, (-1, GROUP)) for x in (here, allowed))
        found, top = space.scores[allowed], space.best[seen.any(2)]
        assert torch.equal(found.nan_to_num(7e9), here[allowed].nan_to_num(7e9))
        assert torch.equal(top.nan_to_num(7e9), best.amax(2)[seen.any(2)].nan_to_num(7e9))


@pytest.mark.parametrize(
    "lengths, begin, stop, heads, dim",
    [
        ((40,), 0, 40, 32, 64),
        ((128,), 100, 128, 32, 64),
        ((1, 2, 1), 0, 4, 32, 64),
        ((9, 3, 1, 700, 5), 670, 718, 32, 64),
        ((9, 3, 1, 700, 5), 1, 21, 16, 64),
        ((650, 30), 630, 660, 64, 128),
        ((300, 40), 280, 330, 8, 64),
    ],
)
def test_scores_and_the_best_of_each_group_are_exactly_the_definitions(
    lengths, begin, stop, heads, dim
):
    problem = make_problem(
        lengths, size=2, heads=heads, dim=dim, dtype=torch.bfloat16, begin=begin, stop=stop
    )
    problem.queries[2, 5, 7] = NAN  # of the whole row, and of no other
    windows = plan(lengths, 2, count=4, begin=begin, stop=stop, cap_bytes=40_000)
    check(problem, *problem.ranges(begin), windows)


@pytest.mark.parametrize(
    "lengths, begin, stop, heads, dim",
    [((40,), 0, 40, 32, 64), ((9, 3, 1, 700, 5), 670, 718, 32, 64), ((650, 30), 630, 660, 64, 128)],
)
def test_in_fp8_it_computes_the_same_where_fp8_holds_the_numbers(lengths, begin, stop, heads, dim):
    problem = make_problem(lengths, size=2, heads=heads, dim=dim, begin=begin, stop=stop)
    problem.keys *= 2.0 ** torch.randint(-3, 4, (len(problem.keys), 1))
    problem.queries[2, 5, 7] = NAN
    windows = plan(lengths, 2, count=4, begin=begin, stop=stop, cap_bytes=40_000)
    check(problem, *problem.ranges(begin), windows, in_fp8=True)


def test_ranges_need_not_ascend_nor_hold_anything():
    problem = make_problem((1400,), size=2, heads=32, dtype=torch.bfloat16, begin=0, stop=20)
    first = torch.tensor([600, 600, 600, 600, 70, 600, 620, 690, 512, 3] * 2).int()
    end = torch.tensor([700, 690, 610, 601, 71, 600, 600, 700, 513, 64] * 2).int()
    check(problem, first, end, (Window(0, 20, 0, 704, 100),))


def test_no_time_goes_into_tiles_that_no_query_may_choose_from():
    problem = make_problem((1400,), size=2, heads=32, dtype=torch.bfloat16, begin=0, stop=8)
    window = Window(0, 8, 0, 704, 40)
    ((_, space),) = workspaces((window,), 4, torch.device("cpu"))
    space.scores.fill_(NAN)
    first, end = torch.full((8,), 200).int(), torch.full((8,), 240).int()
    gluon_scores.write_scores(
        problem.queries, problem.weights, problem.keys, first, end, space, window, SCALE
    )
    scored = ~space.scores.isnan().all(0)
    assert scored.nonzero().flatten().tolist() == list(range(192, 256))
