"""Run the Triton kernels of the indexer on a CPU, in Triton's interpreter.

``TRITON_INTERPRET=1 python -m tests.unit.indexer_interpreted`` exits with 0 if all is as defined.
The interpreter is slow, and has to be on before Triton is first imported: hence the few rows and
the process of its own. It multiplies no bfloat16, so the operands are float16.
"""

import os
import sys

import torch

from kernels.indexer import triton_scores, triton_topk, walk
from kernels.indexer.windows import GROUP, Window, Workspace, plan
from tests.unit.indexer_support import SCALE, choose_by_sorting, make_problem

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
    rows, width = 14, 192
    scores = torch.randn(rows, width, generator=random)
    scores[1] = torch.randint(-1, 2, (width,), generator=random).float()
    scores[2] = 0.0
    scores[3, ::2] = -0.0
    scores[3, 1::2] = 0.0
    scores[4, 5:150:7], scores[4, 60] = INF, NAN
    scores[5] = -INF
    scores[6, 3:] = -1e-40
    scores[7] = torch.arange(width).float() * 1e-3 - 0.1
    first = torch.tensor([0, 0, 3, 17, 1, 2, 0, 100, 64, 50, 16, 31, 0, 191], dtype=torch.int32)
    end = torch.tensor([192, 190, 192, 180, 160, 90, 192, 191, 64, 52, 20, 50, 1, 192]).int()
    window = Window(0, rows, 0, width, int((end - first).max()))
    for count in (5, 8):
        want = choose_by_sorting(scores, first, end, count)
        for in_steps in (False, True):
            out = torch.full((rows, count), 99, dtype=torch.int32)
            space = space_of(scores, first, end, count)
            triton_topk.choose(space, first, end, window, out, in_steps=in_steps)
            wrong = (out != want).any(1).nonzero().flatten().tolist()
            assert not wrong, (count, in_steps, wrong, out[wrong], want[wrong])


def check_walk(lengths: tuple[int, ...], count: int, cap_bytes: int, begin: int, stop: int) -> None:
    """Scores and choice together, from the middle of a batch, in several windows."""
    problem = make_problem(lengths, size=2, heads=32, dtype=torch.float16, begin=begin, stop=stop)
    first, end = problem.ranges(begin)
    windows = plan(lengths, 2, count=count, cap_bytes=cap_bytes, begin=begin, stop=stop)
    assert len(windows) > 1
    found = walk.select(
        triton_scores.write_scores, problem.queries, problem.weights, problem.keys, first, end,
        windows, count, SCALE,
    )  # fmt: skip
    want = choose_by_sorting(problem.scores(), first, end, count)
    assert torch.equal(found, want), (found != want).any(1).nonzero()


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1")
    check_choice()
    check_walk((9, 3, 1, 210, 5), 3, 3000, 4, 24)
    print("as defined")
