"""The short convolution against one conv1d per document: outputs, gradients, what is visible."""

import pytest
import torch
import torch.nn.functional as F

import kernels.short_conv.fla
import kernels.short_conv.naive
from kernels.short_conv.naive import short_conv

RAGGED = (1, 2, 3, 4, 5, 17, 1, 40)


def positions(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def normal(shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def inputs(
    lengths: tuple[int, ...], channels: int, taps: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(sum(lengths), channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(channels, 1, taps, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(torch.promote_types(dtype, torch.float32))


def per_document(x: torch.Tensor, weight: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """conv1d over one padded document at a time, in float64."""
    out = []
    for document in x.double().split(lengths):
        padded = F.pad(document.mT.unsqueeze(0), (weight.shape[-1] - 1, 0))
        out.append(F.conv1d(padded, weight.double(), groups=x.shape[1]).squeeze(0).mT)
    return F.silu(torch.cat(out))


@pytest.mark.parametrize("taps", [1, 2, 4, 6])
@pytest.mark.parametrize("lengths", [RAGGED, (1,), (2, 1), (73,)], ids=str)
@pytest.mark.parametrize("block", [1, 3, 8, 2048])
def test_outputs_and_gradients_equal_a_convolution_per_document(
    taps: int, lengths: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.short_conv.naive, "BLOCK", block)
    x, weight = inputs(lengths, 5, taps)
    weight.requires_grad_()
    out = short_conv(x, weight, positions(lengths), lengths)
    expected = per_document(x, weight, lengths)
    upstream = normal(expected.shape).double()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
    )


def test_gradients_agree_with_finite_differences() -> None:
    lengths = (1, 3, 6)
    x, weight = inputs(lengths, 3, 4)
    assert torch.autograd.gradcheck(
        lambda x, weight: short_conv(x, weight, positions(lengths), lengths),
        (x, weight.requires_grad_()),
    )


def test_low_precision_is_rounded_once() -> None:
    x, weight = inputs(RAGGED, 16, 4, torch.bfloat16)
    weight.requires_grad_()
    out = short_conv(x, weight, positions(RAGGED), RAGGED)
    expected = per_document(x, weight, RAGGED)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
    upstream = normal(out.shape).bfloat16()
    found = torch.autograd.grad(out, (x, weight), upstream)
    wanted = torch.autograd.grad(expected, (x, weight), upstream.double())
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(found[0].double(), wanted[0].double(), rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-4)


def test_what_comes_before_a_document_does_not_reach_it_even_if_it_is_not_finite() -> None:
    lengths = (5, 9)
    x, weight = inputs(lengths, 4, 4, torch.float32)
    clean = short_conv(x, weight, positions(lengths), lengths)[5:]
    clean_grad = torch.autograd.grad(clean.sum(), x)[0][5:]
    with torch.no_grad():
        x[:5] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan, 1]).unsqueeze(1)
    dirty = short_conv(x, weight, positions(lengths), lengths)[5:]
    assert torch.equal(dirty, clean)
    assert torch.equal(torch.autograd.grad(dirty.sum(), x)[0][5:], clean_grad)


def test_later_tokens_do_not_change_earlier_ones() -> None:
    x, weight = inputs((30,), 4, 4, torch.float32)
    whole = short_conv(x, weight, torch.arange(30), (30,))
    part = short_conv(x[:17], weight, torch.arange(17), (17,))
    assert torch.equal(whole[:17], part)


def test_a_fragment_sees_what_its_positions_say() -> None:
    """Three tokens of the same document in front of a fragment make it whole."""
    x, weight = inputs((20,), 4, 4, torch.float32)
    whole = short_conv(x, weight, torch.arange(20), (20,))
    fragment = short_conv(x[7:], weight, torch.arange(7, 20), (13,))
    assert torch.equal(fragment[3:], whole[10:])
    assert not torch.equal(fragment[:3], whole[7:10])


def test_only_the_input_and_the_weight_are_kept_for_backward() -> None:
    x, weight = inputs((50,), 8, 4, torch.bfloat16)
    kept: list[torch.Tensor] = []
    position = torch.arange(50)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        short_conv(x, weight.requires_grad_(), position, (50,))
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (x, weight, position)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(4, 4)}, r"weight: shape \(4, 4\); legal .* \(4, 1, K\)"),
        ({"weight": torch.zeros(3, 1, 4)}, r"weight: shape \(3, 1, 4\)"),
        ({"position": torch.arange(5)}, r"position: shape \(5,\); legal .*: \(6,\)"),
        ({"lengths": (4, 1)}, r"lengths: \(4, 1\), 2 documents of 5 tokens; legal: .* 6 tokens"),
        ({"lengths": (6, 0)}, r"each of 1 token or more"),
        ({"lengths": ()}, r"at least one document"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, object], message: str) -> None:
    arguments = {
        "x": torch.zeros(6, 4),
        "weight": torch.zeros(4, 1, 4),
        "position": torch.arange(6),
        "lengths": (6,),
    }
    with pytest.raises(ValueError, match=message):
        short_conv(**(arguments | changes))


def test_flas_kernel_refuses_a_tensor_that_is_not_on_cuda() -> None:
    with pytest.raises(ValueError, match="model.kda_kernel: 'fla' runs on CUDA only, and x is on"):
        kernels.short_conv.fla.short_conv(
            torch.zeros(6, 4), torch.zeros(4, 1, 4), torch.arange(6), (6,)
        )
