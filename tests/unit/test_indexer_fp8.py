"""The indexer's operands in fp8: how rows are rounded, and what is chosen by them."""

from dataclasses import replace

import pytest
import torch

from kernels.dsa import select as plain
from kernels.indexer import fp8, op
from tests.unit.indexer_support import RAGGED, SCALE, choose_by_sorting, make_problem, rounded

NAN, INF = float("nan"), float("inf")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_near_and_use_the_whole_range(dtype, rotate, monkeypatch):
    monkeypatch.setattr("kernels.row_blocks.ELEMENTS", 1000)
    x = draw(40, 3, 64) * torch.logspace(-3, 3, 40).view(-1, 1, 1)
    x = x.to(dtype)
    wanted = x.double() @ fp8.hadamard(64).double() if rotate else x.double()
    values, factors = fp8.round_rows(x, rotate)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape
    assert factors.dtype == torch.float32 and factors.shape == x.shape[:2]
    assert (factors.frexp().mantissa == 0.5).all()  # powers of two
    most = values.float().abs().amax(-1)
    assert (most > 223).all() and (most <= 448).all()
    # Four bits, of numbers down to 2**-6 of the format and of its smallest unit below.
    bound = torch.maximum(wanted.abs() * 2.0**-4, factors.double().unsqueeze(-1) * 2.0**-10)
    error = (values.double() * factors.double().unsqueeze(-1) - wanted).abs()
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    "largest, power", [(448.0, 0), (449.0, 1), (447.0, 0), (224.0, -1), (224.5, 0), (7.0, -6)]
)
def test_the_factor_is_the_least_power_of_two_that_takes_the_largest(largest, power):
    values, factors = fp8.round_rows(torch.tensor([[-largest, 1.0]]), False)
    assert factors.item() == 2.0**power
    assert values.float().abs().max() <= 448


def test_rows_of_zeros_and_rows_that_are_not_finite():
    x = torch.ones(6, 4)
    x[0], x[1, 2], x[2, 1], x[3, 3] = 0.0, NAN, INF, -INF
    values, factors = fp8.round_rows(x, False)
    assert values[0].float().eq(0).all() and factors[0] == fp8.SMALLEST / 256
    assert values[1:4].float().isnan().all() and factors[1:4].isnan().all()
    assert (values[4:].float() * factors[4:, None] == 1).all()
    assert fp8.round_rows(x[:0], True).values.shape == (0, 4)


def test_hadamard_turns_and_turns_back():
    turn = fp8.hadamard(64)
    assert torch.equal(turn @ turn, 64 * torch.eye(64)) and torch.equal(turn, turn.t())
    with pytest.raises(ValueError, match="rows of 96 channels cannot be turned; legal: powers of"):
        fp8.round_rows(draw(2, 96), True)


@pytest.mark.parametrize("rotate", [False, True])
def test_rounded_operands_keep_scores(rotate):
    """Rows with one channel: exact in fp8, turned or not."""
    channels = torch.randint(64, (30, 4), generator=torch.Generator().manual_seed(3))
    q = torch.nn.functional.one_hot(channels, 64) * draw(30, 4, 1).sign() * 3.0
    k = torch.eye(64).repeat(2, 1) * torch.logspace(-2, 2, 128, base=2).round().unsqueeze(1)
    w = draw(30, 4, seed=1)
    a = fp8.in_fp8(q, w, k, rotate)
    assert a.queries.dtype == a.keys.dtype == fp8.FORMAT
    found = plain.pool_scores(a.queries, a.weights, a.keys, SCALE) * a.key_factors
    torch.testing.assert_close(found, plain.pool_scores(q, w, k, SCALE))


def test_turning_spreads_what_stands_out():
    """Three large channels: fp8 finds more of the pools once they are spread over all."""
    q, k, w = draw(8, 4, 64), draw(4000, 64, seed=1), draw(8, 4, seed=2)
    q[..., :3] *= 40
    k[:, :3] *= 8
    exact = plain.pool_scores(q, w, k, SCALE).topk(100).indices.sort().values.int()
    shares = []
    for rotate in (False, True):
        a = fp8.in_fp8(q, w, k, rotate)
        scores = plain.pool_scores(a.queries, a.weights, a.keys, SCALE) * a.key_factors
        found = scores.topk(100).indices.sort().values.int()
        shares.append(int(fp8.chosen_of(found, exact)) / 800)
    assert 0.8 < shares[0] + 0.02 < shares[1] < 1, shares


def chosen(problem, factors, count, function, **more):
    return function(
        problem.queries, problem.weights, problem.keys, problem.pools, problem.position,
        problem.lengths, size=problem.size, count=count, scale=SCALE, key_factors=factors, **more,
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [*RAGGED, (300, 90)])
@pytest.mark.parametrize("count", [1, 20])
def test_exact_numbers_choose_as_in_full_precision(lengths, count, monkeypatch):
    """In windows that begin behind the first pool, too."""
    monkeypatch.setattr(plain, "_MAX_QUERIES", 50)
    problem = make_problem(lengths)
    problem.keys *= 2.0 ** torch.randint(-3, 4, (len(problem.keys), 1))
    width = min(count, max(lengths) // 4)
    want = choose_by_sorting(problem.scores(), *problem.ranges(), width)
    low, factors = rounded(problem)
    assert torch.equal(chosen(low, factors, count, plain.select_pools), want)
    small = {"backend": "torch", "cap_bytes": 3000}
    assert torch.equal(chosen(low, factors, count, op.select_pools, **small), want)


def test_a_choice_depends_on_no_other_query():
    problem = replace(make_problem((300, 90)), queries=draw(390, 8, 64), keys=draw(97, 64, seed=1))
    whole = fp8.in_fp8(problem.queries, problem.weights, problem.keys, True)
    some = fp8.in_fp8(problem.queries[100:250], problem.weights[100:250], problem.keys, True)
    for a, b in zip(whole[:2], some[:2], strict=True):
        assert torch.equal(a[100:250].float(), b.float())
    assert torch.equal(whole.key_factors, some.key_factors)


def test_pools_found_are_those_in_both():
    random = torch.Generator().manual_seed(0)
    rows = []
    for n in (0, 1, 5, 8):
        ids = torch.randperm(20, generator=random)[:n].sort().values
        rows.append(torch.cat([ids, torch.full((8 - n,), -1)]))
    found = torch.stack(rows).int()
    for wanted in (found, found.flip(0), found.roll(1, 0), found.roll(2, 0)[:, :6]):
        each = zip(found.tolist(), wanted.tolist(), strict=True)
        assert fp8.chosen_of(found, wanted) == sum(len({*a} & {*b} - {-1}) for a, b in each)
    assert fp8.chosen_of(found[:, :0], found[:, :0]) == 0


def test_factors_belong_to_fp8_alone():
    problem = make_problem((40,))
    low, factors = rounded(problem)
    for p, f, words in (
        (low, None, "none, and keys are torch.float8_e4m3fn"),
        (problem, factors, "given, and keys are torch.float32"),
        (low, factors[1:], r"torch.float32 \(9,\).*legal: torch.float32 \(10,\)"),
        (low, factors.double(), r"torch.float64 \(10,\)"),
    ):
        with pytest.raises(ValueError, match=f"key_factors: {words}"):
            chosen(p, f, 3, op.select_pools, backend="torch")


@pytest.mark.parametrize("capability, words", [((8, 0), "8.9 or newer"), ((8, 9), None)])
def test_kernels_refuse_a_gpu_that_has_no_fp8(capability, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    class OnCuda:
        shape, dtype, device, is_cuda = (5, 32, 128), fp8.FORMAT, torch.device("cuda"), True

    reason = op.refusal(OnCuda(), 512)
    assert reason is None if words is None else reason and words in reason
