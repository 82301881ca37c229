"""Run the Triton kernels of the indexer on a CPU, in Triton's interpreter.

``TRITON_INTERPRET=1 python -m tests.unit.indexer_interpreted`` exits with 0 if all is as defined.
The interpreter is slow, and has to be on before Triton is first imported: hence the few rows and
the process of its own. It multiplies no bfloat16, so the operands are float16.
"""

import os
import sys
from contextlib import nullcontext

import torch

from kernels.indexer import fp8, triton_fp8, triton_scores, triton_topk, walk
from kernels.indexer.windows import GROUP, Window, Workspace, plan, workspaces
from tests.unit.indexer_support import SCALE, choose_by_sorting, make_problem, rounded

NAN, INF = float("nan"), float("inf")


def space_of(scores: torch.Tensor, first: torch.Tensor, end: torch.Tensor, count: int) -> Workspace:
    """A workspace with these scores and the best of each group within each row's range."""
    column = torch.arange(scores.shape[1])
    allowed = (column >= first[:, None]) & (column < end[:, None])
    groups = scores.masked_fill(~allowed, -INF).unflatten(1, (-1, GROUP))
    spoiled = scores.masked_fill(~allowed, NAN)  # never looked at
    empty = torch.full((len(scores), count), 77, dtype=torch.int32)
    return Workspace(spoiled.contiguous(), groups.amax(2).contiguous(), empty)


def check_choice() -> None:
    """Given scores: ties, zeros of both signs, infinities, nan, empty and short ranges."""
    random = torch.Generator().manual_seed(1)
    rows, width = 15, 192
    scores = torch.randn(rows, width, generator=random)
    scores[1] = torch.randint(-1, 2, (width,), generator=random).float()
    scores[2] = 0.0
    scores[3, ::2] = -0.0
    scores[3, 1::2] = 0.0
    scores[4, 5:150:7], scores[4, 60] = INF, NAN
    scores[5] = -INF
    scores[6, 3:] = -1e-40
    scores[14, 7], scores[14, 9], scores[14, 99] = INF, -torch.tensor(NAN), NAN
    scores[7] = torch.arange(width).float() * 1e-3 - 0.1
    first = torch.tensor([0, 0, 3, 17, 1, 2, 0, 100, 64, 50, 16, 31, 0, 191, 0], dtype=torch.int32)
    end = torch.tensor([192, 190, 192, 180, 160, 90, 192, 191, 64, 52, 20, 50, 1, 192, 192]).int()
    window = Window(0, rows, 0, width, int((end - first).max()))
    for count in (5, 8):
        want = choose_by_sorting(scores, first, end, count)
        for in_steps in (False, True):
            out = torch.full((rows, count), 99, dtype=torch.int32)
            space = space_of(scores, first, end, count)
            triton_topk.choose(space, first, end, window, out, in_steps=in_steps)
            wrong = (out != want).any(1).nonzero().flatten().tolist()
            assert not wrong, (count, in_steps, wrong, out[wrong], want[wrong])


def check_unaligned_range() -> None:
    """A range that begins at the end of a group touches one group more than its length says."""
    width, count = 2112, 2
    scores = torch.zeros(1, width)
    scores[0, 2050:2053] = 1.0
    first, end = torch.tensor([15]).int(), torch.tensor([2055]).int()
    out = torch.empty(1, count, dtype=torch.int32)
    window = Window(0, 1, 0, width, 2040)
    triton_topk.choose(space_of(scores, first, end, count), first, end, window, out, in_steps=True)
    assert out.tolist() == [[2035, 2036]], out


def check_rows_left() -> None:
    """A row that is done stays as it is; another is chosen from in the groups that it lists."""
    scores = torch.arange(256.0).flip(0).repeat(2, 1)
    first, end = torch.tensor([0, 20]).int(), torch.tensor([256, 200]).int()
    space = space_of(scores, first, end, 3)
    space.groups.copy_(torch.tensor([[triton_topk.DONE, 3, 4], [1, 5, -1]]))
    out = torch.full((2, 3), 99, dtype=torch.int32)
    triton_topk.choose_members(space, first, end, Window(0, 2, 0, 256, 256), out)
    assert out.tolist() == [[99, 99, 99], [0, 1, 2]], out


def check_walk(lengths: tuple[int, ...], count: int, cap_bytes: int, begin: int, stop: int) -> None:
    """Scores, the best of every group, and the choice, for queries from the middle of a batch."""
    problem = make_problem(lengths, size=2, heads=32, dtype=torch.float16, begin=begin, stop=stop)
    first, end = problem.ranges(begin)
    operands = (problem.queries, problem.weights, problem.keys, first, end)
    problem.queries[3, 5, 7] = NAN  # in one head: the row's scores are nan, no other's
    want = problem.scores()
    assert want[3].isnan().all() and not want[4:].isnan().any()
    windows = plan(lengths, 2, count=count, cap_bytes=cap_bytes, begin=begin, stop=stop)
    assert len(windows) > 1
    for window, space in workspaces(windows, count, torch.device("cpu")):
        triton_scores.write_scores(*operands, space, window, SCALE)
        rows = slice(window.q0, window.q1)
        scores = torch.zeros(window.q1 - window.q0, window.width)
        known = want[rows, window.p0 : window.p0 + window.width].float()
        scores[:, : known.shape[1]] = known
        ranges = (first[rows] - window.p0, end[rows] - window.p0)
        best = space_of(scores, *ranges, count).best
        group = torch.arange(best.shape[1])
        seen = (group * GROUP + GROUP > ranges[0][:, None]) & (group * GROUP < ranges[1][:, None])
        assert torch.equal(space.best[seen].nan_to_num(7e9), best[seen].nan_to_num(7e9))
    found = walk.select(triton_scores.write_scores, *operands, windows, count, SCALE)
    want = choose_by_sorting(want, first, end, count)
    assert torch.equal(found, want), (found != want).any(1).nonzero()


def check_fp8(lengths: tuple[int, ...], count: int, begin: int, stop: int) -> None:
    """Rounding of numbers that fp8 holds, turned or not, and a choice by them. The interpreter
    makes numbers of nan and rounds ties its own way."""
    torch.cuda.device_of = lambda x: nullcontext()  # type: ignore[assignment,misc]
    problem = make_problem(lengths, size=2, heads=32, dtype=torch.float16, begin=begin, stop=stop)
    problem.keys *= 2.0 ** torch.randint(-3, 4, (len(problem.keys), 1))
    first, end = problem.ranges(begin)
    want = choose_by_sorting(problem.scores(), first, end, count)
    single = torch.eye(64, dtype=torch.float16).repeat(3, 1) * 7
    single[7] = 0.0
    for rows, turned in ((problem.queries, False), (single, False), (single, True)):
        found, defined = triton_fp8.round_rows(rows, turned), fp8.round_rows_reference(rows, turned)
        for a, b in zip(found, defined, strict=True):
            assert torch.equal(a.float(), b.float()), turned
    low, factors = rounded(problem)
    windows = plan(lengths, 2, count=count, cap_bytes=9000, begin=begin, stop=stop)
    operands = (low.queries, low.weights, low.keys, first, end)
    found = walk.select(triton_scores.write_scores, *operands, windows, count, SCALE, factors)
    assert torch.equal(found, want), (found != want).any(1).nonzero()


def check_nothing_open() -> None:
    """Documents without a whole pool."""
    problem = make_problem((1, 1, 1), size=2, heads=32, dtype=torch.float16)
    operands = (problem.queries, problem.weights, problem.keys, *problem.ranges())
    windows = plan((1, 1, 1), 2, count=2)
    found = walk.select(triton_scores.write_scores, *operands, windows, 2, SCALE)
    assert found.tolist() == [[-1, -1]] * 3


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1")
    check_choice()
    check_unaligned_range()
    check_rows_left()
    check_walk((9, 3, 1, 230, 5), 3, 9000, 221, 246)
    check_fp8((9, 3, 1, 230, 5), 3, 221, 246)
    check_fp8((140, 3, 230, 5), 3, 353, 376)  # windows begin at pool 64
    check_nothing_open()
    print("as defined")
