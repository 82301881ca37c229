"""On a GPU: the indexer in fp8, its rounding and its kernels against their definitions.

Run with `make test ARGS="-m gpu"`.
"""

import pytest
import torch
import torchtitan.tools.utils

from kernels.indexer import fp8, gluon_scores, op, triton_scores, walk
from kernels.indexer.windows import plan, workspaces
from tests.unit.indexer_support import (
    RAGGED,
    SCALE,
    assert_scores,
    choose_by_sorting,
    make_problem,
    rounded,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda" or torch.cuda.get_device_capability() < (8, 9),
        reason='needs a CUDA device from sm_89 on and `make test ARGS="-m gpu"`',
    ),
]

WRITERS = {"gluon": gluon_scores.write_scores, "triton": triton_scores.write_scores}
TINY = (3, 1, 5, 2, 4, 1, 1, 5) * 25
INF = float("inf")


@pytest.fixture(params=list(WRITERS))
def writer(request: pytest.FixtureRequest) -> walk.WriteScores:
    if request.param == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return WRITERS[request.param]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    random = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=random, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 128), (1, 64), (127, 128), (129, 3, 64), (1000, 32, 128)])
def test_rows_are_rounded_as_defined_to_the_bit(shape, dtype):
    x = draw(*shape, seed=1, dtype=dtype)
    if len(x) > 100:
        x[3], x[7], x[11] = 0.0, 7.0, 7.0625
        x[5].flatten()[6], x[6].flatten()[1] = float("nan"), INF
        x[9] *= 2.0**-14
        x[12].mul_(torch.arange(x[12].numel(), device="cuda").view(x[12].shape) % 5 == 0)
    found, wanted = fp8.round_rows(x, False), fp8.round_rows_reference(x, False)
    assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(found.factors.nan_to_num(9e9), wanted.factors.nan_to_num(9e9))


@pytest.mark.parametrize("dim", [64, 128])
def test_turned_rows_are_those_of_the_definition(dim):
    """Integers, whose sums round in no order; and numbers whose sums do."""
    whole = torch.randint(-3, 4, (999, 8, dim), device="cuda").bfloat16()
    found, wanted = fp8.round_rows(whole, True), fp8.round_rows_reference(whole.cpu(), True)
    assert torch.equal(found.values.cpu().view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(found.factors.cpu(), wanted.factors)
    x = draw(999, 8, dim, seed=2)
    found, wanted = fp8.round_rows(x, True), fp8.round_rows_reference(x.cpu(), True)
    back, right = (r.values.cpu().double() * r.factors.cpu()[..., None] for r in (found, wanted))
    assert (back - right).square().mean() < 1e-4 * right.square().mean()
    turned = x.cpu().double() @ fp8.hadamard(dim).double()
    assert (back - turned).square().mean().sqrt() < 0.03 * turned.square().mean().sqrt()


@pytest.mark.parametrize("heads, dim", [(32, 128), (64, 128), (16, 64), (8, 64)])
@pytest.mark.parametrize("lengths", [(2051,), (1, 4, 3, 9, 640, 2, 5, 777)])
def test_scores_are_the_definitions_and_the_best_of_a_group_is_its_best(
    writer, lengths, heads, dim
):
    problem = make_problem(lengths, heads=heads, dim=dim, dtype=torch.bfloat16, device="cuda")
    problem.queries = draw(*problem.queries.shape, seed=1)
    problem.weights = draw(*problem.weights.shape, seed=2, dtype=torch.float32)
    problem.keys = draw(*problem.keys.shape, seed=3) * torch.rand(len(problem.keys), 1).cuda() * 9
    problem.keys = problem.keys.bfloat16()
    problem, factors = rounded(problem, rotate=True)
    want = problem.scores() * factors.cpu()
    windows = plan(lengths, problem.size, count=64)
    for window, space in workspaces(windows, 64, torch.device("cuda")):
        space.scores.fill_(float("nan"))
        operands = problem.queries, problem.weights, problem.keys, *problem.ranges()
        writer(*operands, space, window, SCALE, factors)
        # Tensor cores add products of fp8 with fewer bits than float32 has.
        assert_scores(space, window, want, problem.ranges(), share=1e-3)


@pytest.mark.parametrize("lengths", [*RAGGED, TINY, (1021, 3, 1029), (*TINY, 4099, *TINY)])
@pytest.mark.parametrize("count", [1, 512])
def test_exact_scores_choose_what_sorting_chooses(writer, lengths, count):
    problem = make_problem(lengths, heads=32, dtype=torch.bfloat16, device="cuda")
    problem.keys *= 2.0 ** torch.randint(-3, 4, (len(problem.keys), 1), device="cuda")
    want = choose_by_sorting(problem.scores(), *problem.ranges(), count)
    problem, factors = rounded(problem)
    first, end = problem.ranges()
    windows = plan(lengths, problem.size, count=count)
    found = walk.select(
        writer, problem.queries, problem.weights, problem.keys, first, end, windows, count, SCALE,
        factors,
    )  # fmt: skip
    assert torch.equal(found.cpu(), want)


def test_nan_in_a_query_or_a_key_stays_theirs():
    problem = make_problem((1500,), heads=32, dim=128, dtype=torch.bfloat16, device="cuda")
    clean, of_clean = rounded(problem)
    problem.queries[1200, 3, 5] = float("nan")
    spoiled, factors = rounded(problem)
    options = {"size": 4, "count": 64, "scale": SCALE}

    def choose(p, f):
        return op.select_pools(
            p.queries, p.weights, p.keys, p.pools, p.position, p.lengths, **options, key_factors=f
        )

    found, wanted = choose(spoiled, factors), choose(clean, of_clean)
    others = torch.arange(1500, device="cuda") != 1200
    assert torch.equal(found[others], wanted[others])


def test_a_choice_is_the_same_bits_in_every_run_and_as_a_piece():
    problem = make_problem((9000, 3, 7001), heads=32, dim=128, dtype=torch.bfloat16, device="cuda")
    queries, keys = draw(*problem.queries.shape, seed=1), draw(*problem.keys.shape, seed=2)
    options = {"size": 4, "count": 512, "scale": SCALE}

    def choose(begin: int, stop: int) -> torch.Tensor:
        rows = slice(begin, stop)
        a = fp8.in_fp8(queries[rows], problem.weights[rows], keys, True)
        return op.select_pools(
            a.queries, a.weights, a.keys, problem.pools, problem.position[rows], problem.lengths,
            begin=begin, key_factors=a.key_factors, **options,
        )  # fmt: skip

    whole = choose(0, 16004)
    assert torch.equal(choose(0, 16004), whole)
    assert torch.equal(choose(5001, 12003), whole[5001:12003])
    exact = op.select_pools(
        queries, problem.weights, keys, problem.pools, problem.position, problem.lengths, **options
    )
    many = problem.position >= 4 * 1024
    recall = fp8.chosen_of(whole[many], exact[many]) / (exact[many] >= 0).sum()
    assert 0.9 < recall < 1
