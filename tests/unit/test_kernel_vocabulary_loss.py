"""Statistics and gradients of strips of logits."""

import pytest
import torch

from kernels.vocabulary_loss.op import fold_strip, gradient_
from kernels.vocabulary_loss.state import (
    entropy,
    log_probability,
    merge,
    new_state,
    normaliser,
)
from tests.unit.kernel_support import draw
from tests.unit.vocabulary_support import small_blocks

INFINITY = float("inf")
CPU = torch.device("cpu")


def columns_of(targets: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return torch.where((targets >= begin) & (targets < end), targets - begin, -1)


def folded(logits: torch.Tensor, targets: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    state = new_state(len(logits), entropy=True, dtype=wide, device=CPU)
    for begin, end in zip([0, *cuts], [*cuts, logits.shape[1]], strict=True):
        fold_strip(logits[:, begin:end], columns_of(targets, begin, end), state)
    return state


@pytest.mark.parametrize("cuts", [[], [5], [1, 2, 19], [7, 7, 20]], ids=str)
def test_strips_of_any_width_give_log_probability_and_entropy(cuts: list[int]) -> None:
    logits, targets = draw(9, 20) * 4, torch.arange(9) * 2
    log_p = torch.log_softmax(logits, 1)
    state = folded(logits, targets, cuts)
    torch.testing.assert_close(log_probability(state), log_p[torch.arange(9), targets])
    torch.testing.assert_close(entropy(state), -(log_p.exp() * log_p).sum(1))
    torch.testing.assert_close(normaliser(state), logits.logsumexp(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_kept_in_float32(dtype: torch.dtype) -> None:
    logits, targets = (draw(9, 300) * 4).to(dtype), torch.arange(9)
    expected = torch.log_softmax(logits.double(), 1)[torch.arange(9), targets]
    found = log_probability(folded(logits, targets, [100]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_columns_of_minus_infinity_weigh_nothing() -> None:
    logits, targets = draw(4, 12), torch.tensor([7, 7, 8, 11])
    logits[0, :6] = -INFINITY  # the whole first strip
    logits[1, 6] = -INFINITY
    logits[3, 11] = -INFINITY  # the target itself
    state = folded(logits, targets, [6])
    torch.testing.assert_close(normaliser(state), logits.logsumexp(1))
    assert log_probability(state)[3] == -INFINITY
    log_p = torch.log_softmax(logits, 1)
    terms = torch.where(log_p == -INFINITY, 0.0, log_p.exp() * log_p)
    torch.testing.assert_close(entropy(state), -terms.sum(1))


@pytest.mark.parametrize("value", [float("nan"), INFINITY])
def test_logits_that_are_no_numbers_are_not_hidden(value: float) -> None:
    logits, targets = draw(3, 12), torch.zeros(3, dtype=torch.int64)
    logits[1, 9] = value
    found = log_probability(folded(logits, targets, [6]))
    assert found.isnan().tolist() == [False, True, False]


def test_a_row_without_any_logit_is_nan_as_in_torch() -> None:
    logits = torch.full((1, 4), -INFINITY, dtype=torch.float64)
    targets = torch.zeros(1, dtype=torch.int64)
    assert torch.log_softmax(logits, 1).isnan().all()
    assert log_probability(folded(logits, targets, [2])).isnan().all()


@pytest.mark.parametrize("rows", [0, 3])
def test_a_strip_without_columns_changes_nothing(rows: int) -> None:
    state = folded(draw(3, 8), torch.arange(3), [])[:, :rows].contiguous()
    before = state.clone()
    empty, columns = torch.empty(rows, 0), torch.full((rows,), -1)
    fold_strip(empty.double(), columns, state)
    assert torch.equal(state, before)
    gradient_(empty, columns, torch.zeros(rows), torch.ones(()))


def test_merged_states_are_the_state_of_all_columns() -> None:
    logits, targets = draw(5, 24) * 3, torch.arange(5) * 4
    logits[2, 8:16] = -INFINITY
    parts = []
    for begin in (0, 8, 16):
        part = new_state(5, entropy=True, dtype=torch.float64, device=CPU)
        fold_strip(logits[:, begin : begin + 8], columns_of(targets, begin, begin + 8), part)
        parts.append(part)
    torch.testing.assert_close(merge(torch.stack(parts)), folded(logits, targets, []))


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradient_is_in_place_and_rounded_once(per_row: bool, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = torch.full((6, 24), 7.0, dtype=dtype)  # the strip is part of a larger buffer
    whole[:, :20] = (draw(6, 20) * 3).to(dtype)
    columns = torch.tensor([0, -1, 19, -1, 4, 4])
    lse = whole[:, :20].to(wide).logsumexp(1) + 0.5
    scale = draw(6).to(wide).abs() if per_row else torch.tensor(0.25, dtype=wide)
    hit = torch.nn.functional.one_hot(columns.clamp(min=0), 20) * (columns >= 0).unsqueeze(1)
    p = (whole[:, :20].to(wide) - lse.unsqueeze(1)).exp()
    expected = ((p - hit) * scale.expand(6).unsqueeze(1)).to(dtype)
    gradient_(whole[:, :20], columns, lse, scale)
    torch.testing.assert_close(whole[:, :20], expected, rtol=1e-6, atol=0)
    assert (whole[:, 20:] == 7).all()


def test_blocks_of_rows_change_no_bit() -> None:
    logits, targets = draw(7, 12).float(), torch.arange(7)
    whole = folded(logits, targets, [4])
    strip = logits.clone()
    gradient_(strip, targets, normaliser(whole), torch.ones(()))
    with small_blocks(24):
        assert torch.equal(folded(logits, targets, [4]), whole)
        blocks = logits.clone()
        gradient_(blocks, targets, normaliser(whole), torch.ones(()))
    assert torch.equal(blocks, strip)


def test_what_does_not_fit_is_refused() -> None:
    strip, columns = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    state = new_state(3, entropy=False, dtype=torch.float32, device=CPU)
    lse, scale = torch.zeros(3), torch.ones(())
    with pytest.raises(ValueError, match=r"state is torch.float64 \(3, 3\); legal: torch.float32"):
        fold_strip(strip, columns, state.double())
    with pytest.raises(ValueError, match=r"columns is torch.int32 \(3,\); legal"):
        fold_strip(strip, columns.int(), state)
    with pytest.raises(ValueError, match="do not lie side by side"):
        gradient_(torch.zeros(8, 3).t(), columns, lse, scale)
    with pytest.raises(ValueError, match=r"lse is torch.float32 \(2,\); legal: .*\(3,\)"):
        gradient_(strip, columns, lse[:2], scale)
    with pytest.raises(ValueError, match=r"scale is torch.float32 \(2,\); legal"):
        gradient_(strip, columns, lse, lse[:2])
