"""Rotary frequencies and ALiBi's slopes against their definitions, written out in float64."""

import math

import pytest
import torch

from kernels.attention.sdpa import chunked_sdpa
from kernels.position.alibi import DistanceBias, alibi_slopes
from kernels.position.rotary import inverse_frequencies, rotation_table, temperature_root

WIDTHS = [16, 48, 80, 128]
THETAS = [10_000.0, 10_000_000.0]
TRAINED, FACTOR = 4096, 8.0
STRETCHES = ["none", "linear", "ntk", "yarn", "llama"]


def wavelengths(width: int, theta: float) -> list[float]:
    """Tokens of a full turn of every pair."""
    return [2 * math.pi * theta ** (2 * i / width) for i in range(width // 2)]


def by_parts(width: int, theta: float, slow: float, fast: float) -> list[float]:
    """YaRN's equations: wavelengths are compared with the trained context."""
    found = []
    for turn in wavelengths(width, theta):
        ratio = TRAINED / turn
        ramp = 0.0 if ratio < slow else 1.0 if ratio > fast else (ratio - slow) / (fast - slow)
        plain = 2 * math.pi / turn
        found.append((1 - ramp) * plain / FACTOR + ramp * plain)
    return found


def llama(width: int, theta: float) -> list[float]:
    """Llama 3.1's own wording: long waves are slowed, short ones kept, medium ones blended."""
    found = []
    for turn in wavelengths(width, theta):
        plain = 2 * math.pi / turn
        if turn < TRAINED / 4:
            found.append(plain)
        elif turn > TRAINED / 1:
            found.append(plain / FACTOR)
        else:
            smooth = (TRAINED / turn - 1) / (4 - 1)
            found.append((1 - smooth) * plain / FACTOR + smooth * plain)
    return found


def defined(stretch: str, width: int, theta: float) -> list[float]:
    plain = [2 * math.pi / turn for turn in wavelengths(width, theta)]
    match stretch:
        case "linear":
            return [rate / FACTOR for rate in plain]
        case "ntk":
            larger = theta * FACTOR ** (width / (width - 2))
            return [larger ** (-2 * i / width) for i in range(width // 2)]
        case "yarn":
            return by_parts(width, theta, 1.0, 32.0)
        case "llama":
            return llama(width, theta)
    return plain


def computed(stretch: str, width: int, theta: float, factor: float = FACTOR) -> torch.Tensor:
    fast = 4.0 if stretch == "llama" else 32.0
    return inverse_frequencies(
        width, theta, stretch, factor=factor, trained_len=TRAINED, beta_fast=fast
    )


@pytest.mark.parametrize("stretch", STRETCHES)
def test_frequencies_equal_the_definition(stretch: str) -> None:
    for width in WIDTHS:
        for theta in THETAS:
            expected = torch.tensor(defined(stretch, width, theta), dtype=torch.float64)
            found = computed(stretch, width, theta)
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("stretch", STRETCHES[1:])
def test_a_factor_of_one_changes_nothing(stretch: str) -> None:
    plain = computed("none", 80, 10_000.0)
    torch.testing.assert_close(computed(stretch, 80, 10_000.0, 1.0), plain, rtol=1e-15, atol=0)
    assert temperature_root(1.0) == 1.0


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor() -> None:
    plain, stretched = computed("none", 48, 1e4), computed("ntk", 48, 1e4)
    assert stretched[0] == plain[0] == 1
    assert float(plain[-1] / stretched[-1]) == pytest.approx(FACTOR, rel=1e-13)
    assert bool((stretched[1:] < plain[1:]).all())


def test_yarn_keeps_fast_pairs_interpolates_slow_ones_and_blends_between() -> None:
    plain, stretched = computed("none", 128, 1e4), computed("yarn", 128, 1e4)
    rotations = TRAINED * plain / (2 * math.pi)
    torch.testing.assert_close(stretched[rotations >= 32], plain[rotations >= 32])
    torch.testing.assert_close(stretched[rotations <= 1], plain[rotations <= 1] / FACTOR)
    between = (rotations > 1) & (rotations < 32)
    assert bool((stretched < plain)[between].all() and (stretched > plain / FACTOR)[between].all())
    assert int(between.sum()) > 10


def test_the_temperature_of_yarn() -> None:
    assert temperature_root(8.0) == pytest.approx(0.1 * math.log(8) + 1)
    assert temperature_root(8.0, 0.0) == 1
    with pytest.raises(ValueError, match="yarn needs the length of the trained context"):
        inverse_frequencies(16, 1e4, "yarn", factor=2.0)


@pytest.mark.parametrize("length", [1, 100_000])
def test_a_table_holds_cosines_then_sines_far_beyond_the_trained_context(length: int) -> None:
    frequencies = computed("yarn", 16, 1e4)
    table = rotation_table(frequencies, length, 1.25)
    assert table.shape == (length, 32) and table.dtype == torch.float32
    for position in {0, length - 1}:
        angles = [position * rate for rate in frequencies.tolist()]
        cosines, sines = [1.25 * math.cos(a) for a in angles], [1.25 * math.sin(a) for a in angles]
        expected = torch.tensor([*cosines, *cosines, *sines, *sines], dtype=torch.float64)
        torch.testing.assert_close(table[position].double(), expected, rtol=1e-6, atol=1e-7)


def test_slopes_of_a_power_of_two() -> None:
    assert alibi_slopes(1) == [2**-8]
    assert alibi_slopes(8) == [1 / 2**i for i in range(1, 9)]
    for heads in (2, 4, 16, 64):
        expected = [2 ** (-8 * i / heads) for i in range(1, heads + 1)]
        assert alibi_slopes(heads) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("heads", [3, 6, 12, 56])
def test_other_counts_take_every_other_slope_of_the_next_power_of_two(heads: int) -> None:
    below = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    doubled = [2 ** (-8 * i / (2 * below)) for i in range(1, 2 * below + 1)]
    assert alibi_slopes(heads) == pytest.approx(first + doubled[0::2][: heads - below], rel=1e-15)
    assert len(set(alibi_slopes(heads))) == heads


def test_no_heads_have_no_slopes() -> None:
    with pytest.raises(ValueError, match="0 heads; there must be at least 1"):
        alibi_slopes(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_the_bias_equals_an_explicit_matrix_in_float64(dtype: torch.dtype) -> None:
    heads, length = 6, 100
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, length, 16), (2, 3, length, 16), (2, 3, length, 16)]
    q, k, v = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    upstream = torch.randn(2, heads, length, 16, generator=generator)
    document = torch.tensor([0] * 30 + [1] * 1 + [2] * 69)
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float32)

    def mask_mod(b, h, i, j):  # type: ignore[no-untyped-def]
        return (i >= j) & (document[i] == document[j])

    out = chunked_sdpa(q, k, v, mask_mod, query_chunk=32, bias=DistanceBias(slopes))
    assert out.dtype == dtype
    found = torch.autograd.grad(out, (q, k, v), upstream.to(dtype))

    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wide = [exact[0], *(t.repeat_interleave(2, dim=1) for t in exact[1:])]
    bias = torch.empty(heads, length, length, dtype=torch.float64)
    for head, slope in enumerate(alibi_slopes(heads)):
        for i in range(length):
            for j in range(length):
                seen = j <= i and document[i] == document[j]
                bias[head, i, j] = -slope * (i - j) if seen else -math.inf
    dense = torch.softmax(wide[0] @ wide[1].mT / 4 + bias, -1) @ wide[2]
    expected = torch.autograd.grad(dense, exact, upstream.to(dtype).double())
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    for ours, theirs in zip((out, *found), (dense, *expected), strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert float(error) < tolerance
