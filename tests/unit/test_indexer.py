"""The indexer's choice on a CPU: against its definition, under a cap, and its kernels' code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

from kernels.dsa import select as plain
from kernels.indexer import op, triton_topk, walk
from kernels.indexer.windows import (
    CAP_BYTES,
    GROUP,
    TILE,
    Window,
    most_groups,
    plan,
    window_bytes,
    workspaces,
)
from tests.unit.indexer_support import RAGGED, SCALE, choose_by_sorting, make_problem

ROOT = Path(__file__).parents[2]
M = 2**20


def chosen(problem, count, *, cap_bytes=CAP_BYTES, begin=0, function=op.select_pools, **backend):
    if function is op.select_pools:
        backend = {"cap_bytes": cap_bytes, "backend": "torch", **backend}
    return function(
        problem.queries, problem.weights, problem.keys, problem.pools, problem.position,
        problem.lengths, size=problem.size, count=count, scale=SCALE, begin=begin, **backend,
    )  # fmt: skip


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_choice_is_that_of_the_definition_in_float64(lengths, dtype, count):
    problem = make_problem(lengths, dtype=dtype)
    width = min(count, max(lengths) // 4)
    want = choose_by_sorting(problem.scores(), *problem.ranges(), width)
    assert torch.equal(chosen(problem, count), want)
    assert torch.equal(chosen(problem, count, function=plain.select_pools), want)


@pytest.mark.parametrize("begin, stop", [(0, 137), (20, 137), (129, 135), (136, 137)])
def test_queries_from_the_middle_choose_as_in_the_whole(begin, stop):
    lengths = (65, 1, 64, 7)
    part = make_problem(lengths, begin=begin, stop=stop, seed=3)
    want = choose_by_sorting(part.scores(), *part.ranges(begin), 5)
    assert torch.equal(chosen(part, 5, begin=begin), want)


@pytest.mark.parametrize("lengths", [(700, 90), (1, 2, 3, 4, 5) * 40, (300, 3, 1, 500)])
def test_a_choice_does_not_depend_on_the_cap(lengths):
    problem = make_problem(lengths, dim=4)
    small = 4096
    assert len(plan(lengths, 4, count=9, cap_bytes=small)) > 4
    assert torch.equal(chosen(problem, 9), chosen(problem, 9, cap_bytes=small))


def test_batches_without_a_whole_pool_choose_nothing():
    problem = make_problem((3, 2, 1))
    assert chosen(problem, 4).shape == (6, 0)
    problem = make_problem((3, 5))
    assert chosen(problem, 4).flatten().tolist() == [-1] * 6 + [0, 0]


def cut(length: int, parts: int) -> tuple[int, ...]:
    return (length // parts,) * parts


@pytest.mark.parametrize("begin, stop", [(0, None), (5, None), (1000, 1003), (2999, 3000)])
@pytest.mark.parametrize("lengths", [(4097,), (1, 3, 2, 5) * 300, (2000, 1500, 3)])
def test_windows_cover_every_query_once_and_all_it_may_choose(lengths, begin, stop):
    problem = make_problem(lengths, heads=1, dim=1, begin=begin, stop=stop)
    first, end = problem.ranges(begin)
    seen = 0
    for window in plan(lengths, 4, count=8, cap_bytes=100_000, begin=begin, stop=stop):
        assert (
            window.q0 == seen and window.q1 > seen and window.p0 % TILE == window.width % TILE == 0
        )
        seen, rows = window.q1, slice(window.q0, window.q1)
        assert window.widest == int((end - first)[rows].max())
        if window.width:
            assert window.p0 <= int(first[rows].min())
            assert int(end[rows].max()) <= window.p0 + window.width
        assert window_bytes(window.q1 - window.q0, window.width, 8) <= 100_000
    assert seen == len(first)


@pytest.mark.parametrize(
    "lengths", [(M // 8,), cut(M // 8, 16), (M,), cut(M, 256), (1, 2, 5) * 99_999]
)
def test_no_window_takes_more_than_the_cap_and_none_is_needlessly_small(lengths):
    windows = plan(lengths, 4, count=512)
    for window in windows[:-1]:
        assert window_bytes(window.q1 - window.q0, window.width, 512) > 0.8 * CAP_BYTES
    for window, space in workspaces(windows, 512, torch.device("meta")):
        memory = space.scores.untyped_storage()
        assert memory.nbytes() <= CAP_BYTES
        assert sum(x.numel() * x.itemsize for x in space) <= memory.nbytes()
        assert space.scores.shape == (window.q1 - window.q0, window.width)


def test_the_operator_has_a_shape_without_data():
    shape, rows = (M, 32, 128), M
    meta = {"device": "meta"}
    ids = op.select(
        torch.empty(shape, dtype=torch.bfloat16, **meta), torch.empty(shape[:2], **meta),
        torch.empty(M // 4, 128, dtype=torch.bfloat16, **meta),
        torch.empty(rows, dtype=torch.int32, **meta), torch.empty(rows, dtype=torch.int32, **meta),
        plan((M,), 4, count=512), count=512, scale=SCALE, backend="torch",
    )  # fmt: skip
    assert ids.shape == (M, 512) and ids.dtype == torch.int32 and ids.is_meta


def test_the_operator_is_a_legal_one():
    problem = make_problem((70, 9))
    first, end = problem.ranges()
    flat = [n for window in plan(problem.lengths, 4, count=3) for n in window]
    args = (problem.queries, problem.weights, problem.keys, first, end, flat, 3, SCALE, M, "torch")
    opcheck(torch.ops.indexer.select.default, (*args, None))


@pytest.mark.parametrize(
    "capability, language", [((9, 0), "gluon"), ((10, 0), "triton"), ((8, 0), "triton")]
)
def test_kernels_for_hopper_run_on_hopper_alone(monkeypatch, capability, language):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert walk.writer(device).__module__ == f"kernels.indexer.{language}_scores"
    assert walk.chooser(device).__module__ == f"kernels.indexer.{language}_topk"


def test_operands_begin_where_bulk_copies_can():
    rows = torch.arange(65.0).bfloat16()
    kept, odd, turned = rows[8:64].view(7, 8), rows[1:].view(8, 8), rows[1:].view(8, 8).t()
    assert op._aligned(kept) is kept
    for x in (odd, turned, rows[:64].view(8, 8).t()):
        found = op._aligned(x)
        assert found.data_ptr() % 16 == 0 and found.is_contiguous() and torch.equal(found, x)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"backend": "cuda"}, "backend: 'cuda'; legal: 'triton', 'torch'"),
        (
            {"backend": "triton"},
            "backend: 'triton' cannot run .* CUDA only.*cpu; legal here: 'torch'",
        ),
        ({"weights": torch.ones(79, 8).double()}, r"weights: torch.float64 .*legal: torch.float32"),
        ({"keys": torch.ones(19, 32)}, r"keys: .*\(19, 32\).*legal: torch.float32 \(19, 64\)"),
        ({"end": torch.ones(79)}, r"end: torch.float32 .*legal: torch.int32 \(79,\)"),
        ({"scale": 0.0}, "scale: 0.0; legal: .*scale > 0"),
        ({"count": 0}, "count: 0.*legal: count >= 1"),
        ({"windows": (Window(0, 70, 0, 64, 17),)}, "windows: they do not cover 79 queries"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    problem = make_problem((70, 9))
    first, end = problem.ranges()
    arguments = {
        "queries": problem.queries, "weights": problem.weights, "keys": problem.keys,
        "first": first, "end": end, "windows": plan(problem.lengths, 4, count=3), "count": 3,
        "scale": SCALE, "backend": "torch", **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        op.select(**arguments)


def test_a_cap_below_one_query_says_what_would_do():
    with pytest.raises(ValueError, match=r"cap_bytes: 1000 .*legal: at least 2208 here"):
        plan((2000,), 4, count=8, cap_bytes=1000, begin=1999)


def test_kernels_do_as_defined_in_tritons_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.indexer_interpreted"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("as defined\n"), done.stdout + done.stderr


@pytest.mark.parametrize("pools", [1, 2, 15, 16, 17, 18, 33, 2040])
def test_no_range_touches_more_groups_than_are_made_room_for(pools):
    touched = [(begin + pools - 1) // GROUP - begin // GROUP + 1 for begin in range(GROUP)]
    assert most_groups(pools) == max(touched)


def test_groups_are_ranked_where_those_chosen_hold_fewer_columns():
    lengths = (64, 65, 8192, 8193)
    assert [triton_topk.ranks_groups(n, 3) for n in lengths] == [False, True, True, True]
    assert [triton_topk.ranks_groups(n, 512) for n in lengths] == [False, False, False, True]
