"""What the Hopper kernel of the indexer computes, without a GPU; see ``gluon_on_cpu``."""

import pytest
import torch

from kernels.indexer import gluon_scores
from kernels.indexer.windows import GROUP, TILE, plan, workspaces
from tests.unit import gluon_on_cpu
from tests.unit.indexer_support import SCALE, make_problem

SEGMENT = 256
NAN, INF = float("nan"), float("inf")


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
    first, end = problem.ranges(begin)
    want = problem.scores().float()
    per_program = gluon_scores.COLUMNS // heads
    windows = plan(lengths, 2, count=4, begin=begin, stop=stop, cap_bytes=40_000)
    for window, space in workspaces(windows, 4, torch.device("cpu")):
        space.scores.fill_(NAN)
        space.best.fill_(NAN)
        rows = slice(window.q0, window.q1)
        gluon_on_cpu.run(
            gluon_scores._scores_kernel,
            gluon_scores,
            (-(-(window.q1 - window.q0) // per_program), -(-window.width // SEGMENT)),
            gluon_on_cpu.Descriptor(problem.queries.flatten(0, 1), gluon_scores.COLUMNS // 2),
            problem.weights, gluon_on_cpu.Descriptor(problem.keys, TILE), first, end,
            space.scores, space.best, SCALE, window.q0, window.q1, window.p0, window.width,
            segment=SEGMENT, HEADS=heads, DIM=dim, QUERIES=per_program // 2, POOLS=TILE,
            GROUP=GROUP,
        )  # fmt: skip
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
