"""On a GPU: the indexer's kernels against the definition, where sizes and addresses are awkward.

Run with `make test ARGS="-m gpu"`.
"""

from functools import partial

import pytest
import torch
import torchtitan.tools.utils

from kernels.indexer import gluon_scores, gluon_topk, op, triton_scores, triton_topk, walk
from kernels.indexer.windows import CAP_BYTES, GROUP, Window, Workspace, plan, workspaces
from tests.unit.indexer_support import (
    RAGGED,
    SCALE,
    Problem,
    assert_scores,
    choose_by_sorting,
    make_problem,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

TINY = (3, 1, 5, 2, 4, 1, 1, 5) * 25
LENGTHS = [*RAGGED, TINY, (1021, 3, 1029), (*TINY, 4099, *TINY)]
WRITERS = {"gluon": gluon_scores.write_scores, "triton": triton_scores.write_scores}
INF, NAN = float("inf"), float("nan")


def hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(params=list(WRITERS))
def writer(request: pytest.FixtureRequest) -> walk.WriteScores:
    if request.param == "gluon" and not hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    return WRITERS[request.param]


def exact(lengths: tuple[int, ...], **settings) -> Problem:
    """Small integers: every sum is exact, scores tie often."""
    return make_problem(lengths, dtype=torch.bfloat16, device="cuda", **settings)


def rough(lengths: tuple[int, ...], heads: int = 32, dim: int = 128, seed: int = 0) -> Problem:
    """Normal numbers, drawn on the device."""
    problem = make_problem(lengths, heads=1, dim=1, dtype=torch.bfloat16, device="cuda")
    random = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device="cuda", dtype=dtype)

    problem.queries = draw(len(problem.queries), heads, dim)
    problem.weights = draw(len(problem.queries), heads, dtype=torch.float32)
    problem.keys = draw(len(problem.keys), dim)
    return problem


def written(writer: walk.WriteScores, problem: Problem, cap_bytes: int = CAP_BYTES):
    """Every window with its scores, kept."""
    first, end = problem.ranges()
    windows = plan(problem.lengths, problem.size, count=64, cap_bytes=cap_bytes)
    for window, space in workspaces(windows, 64, torch.device("cuda")):
        space.scores.fill_(NAN)
        space.best.fill_(NAN)
        if window.width:
            writer(problem.queries, problem.weights, problem.keys, first, end, space, window, SCALE)
            yield window, space


def walked(writer: walk.WriteScores, problem: Problem, count: int, cap_bytes: int = CAP_BYTES):
    first, end = problem.ranges()
    windows = plan(problem.lengths, problem.size, count=count, cap_bytes=cap_bytes)
    return walk.select(
        writer, problem.queries, problem.weights, problem.keys, first, end, windows, count, SCALE
    )


@pytest.mark.parametrize("heads, dim", [(32, 128), (64, 128), (16, 64), (8, 64)])
@pytest.mark.parametrize("lengths", [(2051,), (1, 4, 3, 9, 640, 2, 5, 777)])
def test_scores_are_the_definitions_and_the_best_of_a_group_is_its_best(
    writer, lengths, heads, dim
):
    problem = rough(lengths, heads, dim)
    want = problem.scores()
    for window, space in written(writer, problem):
        assert_scores(space, window, want, problem.ranges(), share=2e-4)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("count", [1, 16, 512])
def test_exact_scores_choose_what_sorting_chooses(writer, lengths, count):
    problem = exact(lengths, heads=32)
    want = choose_by_sorting(problem.scores(), *problem.ranges(), count)
    assert torch.equal(walked(writer, problem, count).cpu(), want)


@pytest.mark.parametrize("seed", range(16))
def test_sixteen_draws(writer, seed):
    problem = exact((5, 1 + 331 * seed, 64, 3, 2049 - 100 * seed), heads=16, seed=seed)
    want = choose_by_sorting(problem.scores(), *problem.ranges(), 64)
    assert torch.equal(walked(writer, problem, 64, cap_bytes=10**6).cpu(), want)


def test_a_choice_is_the_same_bits_in_every_run_and_under_every_cap(writer):
    problem = rough((9000, 3, 7001))
    runs = [walked(writer, problem, 512, cap) for cap in (CAP_BYTES, CAP_BYTES, 10**7, 3 * 10**6)]
    assert all(torch.equal(run, runs[0]) for run in runs[1:])
    scores = [
        torch.cat(
            [s.scores.clone().view(torch.int32).flatten() for _, s in written(writer, problem)]
        )
        for _ in range(2)
    ]
    assert torch.equal(*scores)


def awkward_scores(rows: int, width: int) -> torch.Tensor:
    random = torch.Generator(device="cuda").manual_seed(width)
    scores = torch.randn(rows, width, generator=random, device="cuda")
    scores[1] = torch.randint(-1, 2, (width,), generator=random, device="cuda").float()
    scores[2], scores[3, ::2], scores[3, 1::2] = 0.0, -0.0, 0.0
    scores[4, 5::7], scores[4, 60] = INF, NAN
    scores[5], scores[6, 3:] = -INF, -1e-40
    scores[7] = torch.arange(width, device="cuda").float() * 1e-3
    return scores


@pytest.mark.parametrize("count", [1, 17, 512, 2048])
@pytest.mark.parametrize("width", [64, 4096, 32768, 2**18 + 128])
def test_the_choice_among_given_scores_is_exact(width, count):
    rows = 40
    scores = awkward_scores(rows, width)
    random = torch.Generator(device="cuda").manual_seed(count)
    first = torch.randint(0, 50, (rows,), generator=random, device="cuda").int()
    end = torch.randint(40, width + 1, (rows,), generator=random, device="cuda").int()
    first[:8], end[:8] = 0, width
    want = choose_by_sorting(scores, first, end, count)
    column = torch.arange(width, device="cuda")
    allowed = (column >= first[:, None]) & (column < end[:, None])
    best = scores.masked_fill(~allowed, -INF).unflatten(1, (-1, GROUP)).amax(2)
    space = Workspace(
        scores.masked_fill(~allowed, NAN), best, torch.empty(rows, count, device="cuda").int()
    )
    window = Window(0, rows, 0, width, int((end - first).max()))
    ways = {f"in steps: {x}": partial(triton_topk.choose, in_steps=x) for x in (True, False)}
    if width > 32768:
        del ways["in steps: False"]
    if hopper():
        ways["gluon"] = gluon_topk.choose
    for name, choose in ways.items():
        out = torch.full((rows, count), 99, device="cuda", dtype=torch.int32)
        choose(space, first, end, window, out)
        wrong = (out.cpu() != want).any(1).nonzero().flatten().tolist()
        assert not wrong, f"rows {wrong}, {name}"


@pytest.mark.parametrize("alike", [1, 40, 4000])
def test_rows_with_many_members_above_the_bound_are_chosen_from_too(alike):
    if not hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    rows, width, count = 60, 20480, 512
    random = torch.Generator(device="cuda").manual_seed(alike)
    rough = torch.randn(rows, width // alike + 1, generator=random, device="cuda")
    scores = rough.repeat_interleave(alike, 1)[:, :width].contiguous()
    first, end = torch.zeros(rows, device="cuda").int(), torch.full((rows,), width).cuda().int()
    best = scores.unflatten(1, (-1, GROUP)).amax(2)
    space = Workspace(scores, best, torch.empty(rows, count, device="cuda").int())
    out = torch.empty(rows, count, device="cuda", dtype=torch.int32)
    gluon_topk.choose(space, first, end, Window(0, rows, 0, width, width), out)
    assert torch.equal(out.cpu(), choose_by_sorting(scores, first, end, count))


def sampled(problem: Problem, ids: torch.Tensor, rows: list[int], begin: int = 0) -> None:
    """Compare some rows with sorting."""
    first, end = problem.ranges(begin)
    part = Problem(
        queries=problem.queries[rows], weights=problem.weights[rows], keys=problem.keys,
        pools=problem.pools, position=problem.position[rows], lengths=problem.lengths,
        size=problem.size,
    )  # fmt: skip
    want = choose_by_sorting(part.scores(), first[rows], end[rows], ids.shape[1])
    assert torch.equal(ids[rows].cpu(), want)


def test_more_than_2_to_the_18_pools(writer):
    length = 2**20 + 4 * 77 + 3
    problem = exact((length,), heads=8, begin=length - 300, stop=length)
    windows = plan(problem.lengths, 4, count=512, begin=length - 300)
    ids = walk.select(
        writer, problem.queries, problem.weights, problem.keys, *problem.ranges(length - 300),
        windows, 512, SCALE,
    )  # fmt: skip
    sampled(problem, ids, [0, 7, 8, 150, 299], length - 300)


def test_more_than_2_to_the_31_scores_in_a_window(writer):
    length, queries = 2**20, 2**13 + 64
    problem = exact((length,), heads=8, begin=length - queries, stop=length)
    windows = plan(problem.lengths, 4, count=512, cap_bytes=12 * 2**30, begin=length - queries)
    assert len(windows) == 1 and queries * windows[0].width > 2**31
    ids = walk.select(
        writer, problem.queries, problem.weights, problem.keys,
        *problem.ranges(length - queries), windows, 512, SCALE,
    )  # fmt: skip
    sampled(problem, ids, [0, 4095, 8191, queries - 1], length - queries)


def test_more_than_2_to_the_31_numbers_in_the_queries():
    length = 2**19 + 40
    problem = rough((length,))
    assert problem.queries.numel() > 2**31
    problem.queries.clamp_(-2, 2).round_()
    problem.keys.clamp_(-2, 2).round_()
    problem.weights.clamp_(-2, 2).round_()
    writer = walk.writer(torch.device("cuda"))
    ids = walked(writer, problem, 512)
    sampled(problem, ids, [0, 5000, 2**19 - 9, length - 1])


def test_nan_in_memory_that_is_no_key_or_query_is_not_read(writer):
    problem = exact((37, 1, 900, 2), heads=32)
    want = walked(writer, problem, 16)
    for name in ("queries", "weights", "keys"):
        value = getattr(problem, name)
        poisoned = value.new_full((len(value) + 300, *value.shape[1:]), NAN)
        poisoned[: len(value)] = value
        setattr(problem, name, poisoned[: len(value)])
    assert torch.equal(walked(writer, problem, 16), want)


def test_nan_in_a_query_is_chosen_and_stays_in_its_row(writer):
    problem = exact((900,), heads=32, dim=128)
    want = walked(writer, problem, 16)
    problem.queries[450, 3, 5] = NAN
    found = walked(writer, problem, 16)
    assert found[450].tolist() == list(range(16))  # all are nan: ties go to the lowest
    others = torch.arange(900, device="cuda") != 450
    assert torch.equal(found[others], want[others])


def test_the_operator_runs_the_kernels_and_stays_within_its_memory():
    problem = rough((16384,))
    arguments = (problem.queries, problem.weights, problem.keys, problem.pools, problem.position)
    settings = {"size": 4, "count": 512, "scale": SCALE, "cap_bytes": 64 * 2**20}
    op.select_pools(*arguments, problem.lengths, **settings)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ids = op.select_pools(*arguments, problem.lengths, **settings)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 64 * 2**20 + ids.nbytes + 2**20
    plain = op.select_pools(*arguments, problem.lengths, **settings, backend="torch")
    assert (ids == plain).float().mean() > 0.95  # nearly equal scores may change places


def choose_in_many_windows(problem: Problem) -> torch.Tensor:
    return op.select_pools(
        problem.queries, problem.weights, problem.keys, problem.pools, problem.position,
        problem.lengths, size=problem.size, count=64, scale=SCALE, cap_bytes=8 * 2**20,
    )  # fmt: skip


def test_a_captured_graph_chooses_by_the_numbers_that_it_finds():
    problem, other = rough((20000, 3)), rough((20000, 3), seed=1)
    wants = [choose_in_many_windows(problem), choose_in_many_windows(other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = choose_in_many_windows(problem)
    graph.replay()
    assert torch.equal(ids, wants[0])
    for name in ("queries", "weights", "keys"):
        getattr(problem, name).copy_(getattr(other, name))
    graph.replay()
    assert torch.equal(ids, wants[1])


def test_streams_do_not_disturb_each_other():
    problems = [rough((20000, 3), seed=seed) for seed in range(3)]
    wants = [choose_in_many_windows(problem) for problem in problems]
    torch.cuda.synchronize()
    found = []
    for problem in problems:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(choose_in_many_windows(problem))
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wants))


def test_operands_at_odd_addresses_are_chosen_from_as_well():
    problem = rough((9000,))
    want = choose_in_many_windows(problem)
    for name in ("queries", "weights", "keys"):
        value = getattr(problem, name)
        moved = value.new_empty(value.numel() + 1)[1:].view(value.shape).copy_(value)
        assert moved.is_contiguous() and moved.data_ptr() % 16
        setattr(problem, name, moved)
    assert torch.equal(choose_in_many_windows(problem), want)
