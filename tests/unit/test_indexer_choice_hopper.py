"""What Hopper's choice of the best scores computes, without a GPU; see ``gluon_rows_on_cpu``."""

import pytest
import torch

from kernels.indexer import gluon_topk, triton_topk
from kernels.indexer.windows import GROUP, TILE, Window, Workspace, workspaces
from tests.unit import gluon_rows_on_cpu
from tests.unit.indexer_support import choose_by_sorting

INF, NAN = float("inf"), float("nan")
NO_MEANING = 1e30
"""Where a query may not choose: above all scores."""


def awkward(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores with ties, both zeros, infinities, nan, tiny and huge; ranges of all kinds."""
    random = torch.Generator().manual_seed(width)
    scores = torch.randn(20, width, generator=random)
    scores[1] = torch.randint(-1, 2, (width,), generator=random).float()
    scores[2], scores[3, ::2], scores[3, 1::2] = 0.0, -0.0, 0.0
    scores[4, 5::7], scores[4, 60] = INF, NAN
    scores[5], scores[6, 3:] = -INF, -1e-40
    scores[7] = torch.arange(width).float() * 1e-3 - 0.5
    scores[8], scores[9] = -1 - scores[8].abs(), torch.exp(scores[9] * 20)
    scores[10, ::3], scores[10, 1::3], scores[12, :7] = NAN, -NAN, INF
    scores[11] *= 1e-42
    first = torch.tensor([0] * 13 + [3, 50, 17, 0, 16, 50, 100]).int()
    end = torch.tensor([width] * 14 + [width - 1, 21, 0, width, 49, 2600]).int()
    return scores, first, end.clamp(max=width)


def spoiled(scores: torch.Tensor, first: torch.Tensor, end: torch.Tensor):
    """Scores and the best of each group, with anything at all where nothing may be chosen."""
    column = torch.arange(scores.shape[1])
    allowed = (column >= first[:, None]) & (column < end[:, None])
    best = scores.masked_fill(~allowed, -INF).unflatten(1, (-1, GROUP)).amax(2)
    best[~allowed.unflatten(1, (-1, GROUP)).any(2)] = NO_MEANING
    return scores.masked_fill(~allowed, NO_MEANING), best


@pytest.mark.parametrize("width, count", [(1024, 512), (256, 5)])
def test_a_short_row_is_chosen_from_as_by_sorting(width, count):
    scores, first, end = awkward(width)
    out = torch.full((len(scores), count), 99, dtype=torch.int32)
    gluon_rows_on_cpu.run(
        gluon_topk._whole_kernel, gluon_topk, len(scores), values=spoiled(scores, first, end)[0],
        first=first, end=end, out=out, q0=0, p0=0, width=width, count=count,
        SLOTS=2 * width, ROOM=512, WARPS=2 * width // 512,
    )  # fmt: skip
    assert torch.equal(out, choose_by_sorting(scores, first, end, count))


@pytest.mark.parametrize("width, count, left", [(8192, 300, True), (20480, 512, False)])
def test_a_long_row_is_chosen_from_as_by_sorting_or_left_with_its_groups(width, count, left):
    scores, first, end = awkward(width)
    if not left:
        scores, first, end = scores[[0, 9, 12, 13]], first[[0, 9, 12, 13]], end[[0, 9, 12, 13]]
    values, best = spoiled(scores, first, end)
    out = torch.full((len(scores), count), 99, dtype=torch.int32)
    groups = torch.full_like(out, 77)
    gluon_rows_on_cpu.run(
        gluon_topk._filtered_kernel, gluon_topk, len(scores), values=values, bests=best,
        groups=groups, first=first, end=end, out=out, q0=0, p0=0, width=width, count=count,
        SLOTS=2048, GROUP=GROUP, ROOM=512, WARPS=4,
    )  # fmt: skip
    want = choose_by_sorting(scores, first, end, count)
    waiting = groups[:, 0] != triton_topk.DONE
    assert bool(waiting.any()) == left and not waiting.all()
    assert torch.equal(out[~waiting], want[~waiting])
    for row in waiting.nonzero().flatten().tolist():
        listed = groups[row][groups[row] >= 0]
        assert (out[row] == 99).all() and bool((listed.diff() > 0).all())
        columns = want[row][want[row] >= 0] + first[row]
        assert set((columns // GROUP).tolist()) <= set(listed.tolist())


@pytest.mark.parametrize("alike", [1024, 1025, 1920, 1921])
def test_as_many_members_are_held_as_there_is_room_for(alike):
    width, count = 8192, 200
    scores = torch.full((1, width), -1.0)
    places = torch.arange(alike) // count + (torch.arange(alike) % count) * 2 * GROUP
    scores[0, places] = 1.0
    scores[0, places.max()] = 2.0  # the last that is held
    first, end = torch.zeros(1).int(), torch.full((1,), width).int()
    values, best = spoiled(scores, first, end)
    out, groups = (torch.full((1, count), x, dtype=torch.int32) for x in (99, 77))
    gluon_rows_on_cpu.run(
        gluon_topk._filtered_kernel, gluon_topk, 1, values=values, bests=best, groups=groups,
        first=first, end=end, out=out, q0=0, p0=0, width=width, count=count,
        SLOTS=1024, GROUP=GROUP, ROOM=512, WARPS=4,
    )  # fmt: skip
    assert (groups[0, 0] == triton_topk.DONE) == (alike <= 1920)
    if alike <= 1920:
        assert torch.equal(out, choose_by_sorting(scores, first, end, count))


def choose_members(
    space: Workspace, first: torch.Tensor, end: torch.Tensor, window: Window, out: torch.Tensor
) -> None:
    """``triton_topk.choose_members`` by sorting; a row is done or lists its groups."""
    for row in range(len(out)):
        groups = space.groups[row]
        if groups[0] != triton_topk.DONE:
            column = torch.arange(window.p0, window.p0 + window.width)
            listed = torch.isin(column // GROUP, groups)
            scores = space.scores[row].masked_fill(~listed, -INF)[None]
            begin, stop = (x[window.q0 + row, None] - window.p0 for x in (first, end))
            out[row] = choose_by_sorting(scores, begin, stop, out.shape[1])[0]


@pytest.mark.parametrize(
    "first, pools, count",
    [
        (63, 8130, 200),  # in 510 groups, read from the one three before: a power of two more
        (63, 8130, 512),
        (67, 510, 40),  # as with columns
        (128, 1100, 1),
        (191, 8193, 512),
        (64, 131072, 300),  # of as many warps as there may be
        (64, 3, 2),
        (66, 1, 3),
    ],
)
def test_rows_from_anywhere_are_chosen_from_whatever_they_are_sent_to(
    monkeypatch, first, pools, count
):
    for name in ("_whole_kernel", "_filtered_kernel"):
        kernel = gluon_rows_on_cpu.Launched(getattr(gluon_topk, name), gluon_topk)
        monkeypatch.setattr(gluon_topk, name, kernel)
    monkeypatch.setattr(triton_topk, "choose_members", choose_members)
    rows, q0, p0 = 3, 2, first // TILE * TILE
    width = -(-(first + pools - p0) // TILE) * TILE
    window = Window(q0, q0 + rows, p0, width, pools)
    ((_, space),) = workspaces((window,), count, torch.device("cpu"))
    begins = torch.tensor([9**9] * q0 + [first, first, first + pools // 2]).int()
    ends = torch.tensor([0] * q0 + [first + pools] * rows).int()
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(pools))
    scores[:, -(p0 + width - first - pools) - 1] = 9.0  # the last that may be chosen
    scores[1] = scores[1].round()
    values, best = spoiled(scores, begins[q0:] - p0, ends[q0:] - p0)
    space.scores.copy_(values)
    space.best.copy_(best)
    space.groups.fill_(77)
    out = torch.full((rows, count), 99, dtype=torch.int32)
    gluon_topk.choose(space, begins, ends, window, out)
    want = choose_by_sorting(scores, begins[q0:] - p0, ends[q0:] - p0, count)
    assert torch.equal(out, want)


@pytest.mark.parametrize("pools, count", [(2**18, 512), (4096, 513)])
def test_what_does_not_fit_into_a_program_is_left_to_the_other_kernels(monkeypatch, pools, count):
    left = []
    monkeypatch.setattr(triton_topk, "choose", lambda *args: left.append(args))
    window = Window(0, 1, 0, pools, pools)
    ((_, space),) = workspaces((window,), count, torch.device("cpu"))
    first, end = torch.zeros(1).int(), torch.full((1,), pools).int()
    args = (space, first, end, window, torch.empty(1, count, dtype=torch.int32))
    gluon_topk.choose(*args)
    assert left == [args]
