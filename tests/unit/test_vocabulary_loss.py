"""The schedules of the vocabulary loss on one rank; rings are in tests/distributed."""

from collections.abc import Callable

import pytest
import torch

from components.vocabulary.fused import fused
from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.move_activations import move_activations
from components.vocabulary.move_weights import move_weights
from components.vocabulary.strips import strip_buffer, strip_bytes
from components.vocabulary.tokens import IGNORED
from tests.unit.vocabulary_support import (
    Meter,
    Problem,
    answer,
    error,
    make_problem,
    small_blocks,
)

ALONE = VocabularyLayout(37, 1, 1)
MOVES = pytest.mark.parametrize("move", [move_weights, move_activations])
DTYPES = pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)


def run_fused(problem: Problem, dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, ...]:
    x, w = problem.hidden[0].to(dtype), problem.shard(0, dtype)
    dw = torch.zeros_like(w, dtype=torch.float32)
    scale = torch.tensor(problem.scale)
    loss, dx = fused(
        x, w, problem.targets[0], problem.layout, None, scale=scale, rows=rows, dw=dw
    )  # fmt: skip
    assert dx is not None and dx.dtype == dtype
    return loss, dx, dw


@DTYPES
@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_fused_equals_the_definition(
    dtype: torch.dtype, bound: float, rows: int, ignored: float
) -> None:
    problem = make_problem(ALONE, [25], ignored=[ignored])
    expected = answer(problem, [0], 0)
    loss, dx, dw = run_fused(problem, dtype, rows)
    assert error(loss, expected.loss) < bound
    assert error(dx, expected.dx) < bound and error(dw, expected.dw) < bound
    assert (dx[problem.targets[0] == IGNORED] == 0).all()


@MOVES
@DTYPES
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_moves_equal_the_definition(
    move: Callable, dtype: torch.dtype, bound: float, rows: int
) -> None:
    problem = make_problem(ALONE, [25])
    expected = answer(problem, [0], 0)
    x, w = problem.hidden[0].to(dtype).requires_grad_(), problem.shard(0, dtype)
    dw = torch.zeros_like(w, dtype=torch.float32)
    log_p, entropy = move(x, w, problem.targets[0], ALONE, None, rows=rows, dw=dw)
    assert not entropy.requires_grad
    assert error(log_p, expected.log_p) < bound and error(entropy, expected.entropy) < bound
    (-log_p.sum() * problem.scale).backward()
    assert x.grad is not None and x.grad.dtype == dtype
    assert error(x.grad, expected.dx) < bound and error(dw, expected.dw) < bound


@MOVES
def test_moves_take_a_gradient_per_token(move: Callable) -> None:
    problem = make_problem(ALONE, [25])
    hidden, weight = problem.hidden[0].clone().requires_grad_(), problem.weight.clone()
    weights = torch.linspace(-1, 2, 25, dtype=torch.float64)
    target, counted = problem.targets[0], problem.targets[0] != IGNORED
    weight.requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t(), 1)
    log_p = log_p.gather(1, target.clamp(min=0)[:, None]).squeeze(1)
    (log_p * weights * counted).sum().backward()
    x, w = problem.hidden[0].clone().requires_grad_(), problem.weight.clone()
    dw = torch.zeros_like(w)
    found, _ = move(x, w, target, ALONE, None, rows=4, dw=dw)
    (found * weights).sum().backward()
    torch.testing.assert_close(x.grad, hidden.grad)
    torch.testing.assert_close(dw, weight.grad)


@pytest.mark.parametrize("dw_dtype", [torch.float32, torch.bfloat16])
def test_dw_is_added_to_what_is_there(dw_dtype: torch.dtype) -> None:
    problem = make_problem(ALONE, [25])
    x, w = problem.hidden[0].bfloat16(), problem.shard(0, torch.bfloat16)
    dw = torch.full(w.shape, 0.5, dtype=dw_dtype)
    scale = torch.tensor(problem.scale)
    fused(x, w, problem.targets[0], ALONE, None, scale=scale, rows=10, dw=dw, wants_dx=False)
    expected = answer(problem, [0], 0).dw + 0.5
    assert error(dw, expected) < 1e-2


def test_sums_in_float32_do_not_lose_what_sums_in_bfloat16_do() -> None:
    problem = make_problem(ALONE, [400])
    expected = answer(problem, [0], 0).dw
    scale = torch.tensor(problem.scale)
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        x, w = problem.hidden[0].bfloat16(), problem.shard(0, torch.bfloat16)
        dw = torch.zeros_like(w, dtype=dtype)
        fused(x, w, problem.targets[0], ALONE, None, scale=scale, rows=2, dw=dw, wants_dx=False)
        errors.append(error(dw, expected))
    assert errors[0] < 5e-3 < 2 * errors[0] + 5e-3 < errors[1]


def test_forward_alone_is_the_same_loss() -> None:
    problem = make_problem(ALONE, [25])
    x, w = problem.hidden[0].float(), problem.shard(0, torch.float32)
    loss, dx = fused(
        x, w, problem.targets[0], ALONE, None,
        scale=torch.ones(()), rows=7, dw=None, wants_dx=False,
    )  # fmt: skip
    assert dx is None
    assert torch.equal(loss, run_fused(problem, torch.float32, 7)[0])


def test_memory_that_was_not_written_is_not_read() -> None:
    """In this mode torch fills new memory with nan."""
    problem = make_problem(ALONE, [25])
    plain = run_fused(problem, torch.bfloat16, 7)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        poisoned = run_fused(problem, torch.bfloat16, 7)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, poisoned, strict=True))


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_token_counts(tokens: int) -> None:
    problem = make_problem(ALONE, [tokens], ignored=[1.1])
    loss, dx, dw = run_fused(problem, torch.float32, 4)
    assert loss == 0 and dx.shape == (tokens, 6) and not dx.any() and not dw.any()
    for move in (move_weights, move_activations):
        x, w = problem.hidden[0].float().requires_grad_(), problem.shard(0, torch.float32)
        log_p, _ = move(x, w, problem.targets[0], ALONE, None, rows=4, dw=dw)
        log_p.sum().backward()
        assert not log_p.any() and x.grad is not None and not x.grad.any() and not dw.any()


def test_a_loss_without_its_one_hot_part_would_be_noticed() -> None:
    problem = make_problem(ALONE, [25])
    expected = answer(problem, [0], 0)
    counted = (problem.targets[0] != IGNORED).unsqueeze(1) * problem.scale
    softmax_only = torch.softmax(problem.hidden[0] @ problem.weight.t(), 1) * counted
    assert error(softmax_only @ problem.weight, expected.dx) > 0.1
    assert error(softmax_only.t() @ problem.hidden[0], expected.dw) > 0.1


class TestBudget:
    """One strip of logits and nothing of its size beside it."""

    layout = VocabularyLayout(96, 1, 1)
    tokens, rows = 40, 8

    def measured(self, work: Callable[[Problem], object]) -> Meter:
        problem = make_problem(self.layout, [self.tokens], hidden=4)
        meter = Meter(large=self.rows * 96)
        with small_blocks(96), meter:
            work(problem)
        return meter

    def test_fused(self) -> None:
        meter = self.measured(lambda problem: run_fused(problem, torch.float32, self.rows))
        assert meter.largest == self.rows * 96 and meter.most == 1

    @MOVES
    def test_moves(self, move: Callable) -> None:
        def work(problem: Problem) -> None:
            x, w = problem.hidden[0].float().requires_grad_(), problem.shard(0, torch.float32)
            arguments = problem.targets[0], self.layout, None
            log_p, _ = move(x, w, *arguments, rows=self.rows, dw=torch.zeros_like(w))
            log_p.sum().backward()

        meter = self.measured(work)
        assert meter.largest == self.rows * 96 and meter.most == 1

    @MOVES
    def test_one_rank_holds_its_dx_once(self, move: Callable) -> None:
        layout = VocabularyLayout(8, 1, 1)
        problem = make_problem(layout, [40], hidden=64, ignored=[0.0])
        x, w = problem.hidden[0].bfloat16().requires_grad_(), problem.shard(0, torch.bfloat16)
        dw, meter = torch.zeros_like(w, dtype=torch.float32), Meter(large=40 * 64)
        with meter:
            log_p, _ = move(x, w, problem.targets[0], layout, None, rows=self.rows, dw=dw)
            log_p.sum().backward()
        assert meter.most == 2  # x and dX

    def test_the_meter_sees_whole_logits_and_two_strips(self) -> None:
        def work(problem: Problem) -> None:
            strips = [torch.empty(self.rows, 96) for _ in range(2)]
            torch.log_softmax(problem.hidden[0].float() @ problem.weight.float().t(), 1)
            del strips

        meter = self.measured(work)
        assert meter.largest == self.tokens * 96 and meter.most > 2


def test_rows_of_a_strip_are_aligned_and_nothing_is_between_them() -> None:
    junk = [torch.full((3, 128), float("nan"), dtype=torch.bfloat16) for _ in range(50)]
    del junk
    strip = strip_buffer(3, 77, torch.empty(0, dtype=torch.bfloat16))
    assert strip.shape == (3, 77) and strip.stride() == (128, 1)
    assert strip.untyped_storage().nbytes() == strip_bytes(3, 77, torch.bfloat16) == 3 * 128 * 2
    assert (strip.as_strided((3, 128), (128, 1))[:, 77:] == 0).all()
    assert strip_buffer(3, 0, torch.empty(0)).shape == (3, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "strips of 0 rows; legal: a positive multiple of the ring's 1 ranks"),
        ({"w": torch.zeros(36, 6)}, r"w is torch.float32 \(36, 6\); legal for ring rank 0: .*37"),
        ({"w": torch.zeros(37, 6).double()}, "w is torch.float64 .*; legal .* torch.float32"),
        ({"dw": torch.zeros(36, 6)}, r"dw is \(36, 6\); legal: contiguous \(37, 6\)"),
        ({"layout": VocabularyLayout(37, 2, 2)}, "group has 1 ranks; the layout's ring has 2"),
        ({"targets": torch.full((3,), 1.0)}, "targets torch.float32"),
        ({"targets": torch.tensor([1, 37, -1])}, "2 targets of .* 0 of .* legal: 0 to 36, or -100"),
    ],
)
@pytest.mark.parametrize("schedule", [fused, move_weights, move_activations])
def test_arguments_that_do_not_fit_are_refused(
    schedule: Callable, change: dict[str, object], message: str
) -> None:
    arguments = {
        "x": torch.zeros(3, 6),
        "w": torch.zeros(37, 6),
        "targets": torch.zeros(3, dtype=torch.int64),
        "layout": ALONE,
        "group": None,
        "rows": 4,
        "dw": None,
    } | ({"scale": torch.ones(())} if schedule is fused else {})
    with pytest.raises(ValueError, match=message):
        schedule(**(arguments | change))
