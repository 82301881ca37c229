"""KDA in pieces that hand on a state: equal to the whole, wherever documents are cut."""

from typing import Any

import pytest
import torch

import kernels.kda.fla
from kernels.kda import chunked, recurrent
from kernels.kda.fla import split_calls
from tests.unit.kda_support import BOUND, NAMES, inputs, run

Piece = tuple[int, tuple[int, ...], bool, bool]
"""Where it ends; its documents; whether the first goes on from before, the last goes on after."""

# Documents (40, 3, 50, 1, 7, 26), cut inside documents, at their ends, and inside chunks of 16.
LENGTHS = (40, 3, 50, 1, 7, 26)
CUTS: dict[str, list[Piece]] = {
    "inside": [(20, (20,), False, True), (60, (20, 3, 17), True, True), (61, (1,), True, True),
               (99, (32, 1, 5), True, True), (127, (2, 26), True, False)],
    "at ends": [(40, (40,), False, False), (94, (3, 50, 1), False, False),
                (127, (7, 26), False, False)],
    "both": [(43, (40, 3), False, False), (75, (32,), False, True), (93, (18,), True, False),
             (127, (1, 7, 26), False, False)],
}  # fmt: skip


def in_pieces(kernel: Any, pieces: list[Piece]) -> Any:
    """A function like ``kda`` that runs the pieces one after the other."""

    def kda(*arguments: Any, lower_bound: float) -> torch.Tensor:
        *tensors, _ = arguments
        outputs, state, begin = [], None, 0
        for stop, lengths, continued, carries in pieces:
            rows = [x[begin:stop] for x in tensors[:5]]
            out, state = kernel.kda_piece(
                *rows, *tensors[5:], lengths, state if continued else None,
                lower_bound=lower_bound, carries=carries,
            )  # fmt: skip
            assert (state is not None) == carries
            outputs.append(out)
            begin = stop
        return torch.cat(outputs)

    return kda


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kernel", [recurrent, chunked], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("segment", [1, chunked.SEGMENT])
def test_pieces_equal_the_whole_recurrence(
    cuts: str, kernel: Any, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "SEGMENT", segment)
    tensors = inputs(LENGTHS)
    out, grads = run(in_pieces(kernel, CUTS[cuts]), tensors, LENGTHS)
    wanted, wanted_grads = run(recurrent.kda, tensors, LENGTHS)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-13)
    for name, grad, reference in zip(NAMES, grads, wanted_grads, strict=True):
        torch.testing.assert_close(
            grad, reference, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("lengths", [(5,), (16, 17), (3, 1, 30)], ids=str)
def test_states_and_their_gradients_equal_the_recurrence(lengths: tuple[int, ...]) -> None:
    """With a gradient that arrives at the state alone, at the output alone, and at both."""
    tensors = inputs(lengths)
    state = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for weights in ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
        found = []
        for kernel in (chunked, recurrent):
            leaves = [x.clone().requires_grad_() for x in (*tensors, state)]
            out, left = kernel.kda_piece(
                *leaves[:7], lengths, leaves[7], lower_bound=BOUND, carries=True
            )
            total = sum(
                w * (t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum()
                for w, t in zip(weights, (out, left), strict=True)
                if w
            )
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
            zeros = [torch.zeros_like(x) for x in leaves]
            grads = [z if g is None else g for z, g in zip(zeros, grads, strict=True)]
            found.append([out.detach(), left.detach(), *grads])
        for name, actual, wanted in zip(("out", "left", *NAMES, "state"), *found, strict=True):
            torch.testing.assert_close(
                actual, wanted, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
            )


def test_a_state_that_nobody_asks_for_is_not_given_away() -> None:
    tensors = inputs((20,))
    for kernel in (chunked, recurrent):
        out, left = kernel.kda_piece(*tensors, (20,), None, lower_bound=BOUND)
        assert left is None
        assert torch.equal(out, kernel.kda(*tensors, (20,), lower_bound=BOUND))


def test_cut_at_chunks_of_the_document_the_bits_are_the_same() -> None:
    tensors = inputs((130,), dk=16, dv=16, dtype=torch.float32)
    pieces = [(64, (64,), False, True), (130, (66,), True, False)]
    out, grads = run(in_pieces(chunked, pieces), tensors, (130,))
    wanted, wanted_grads = run(chunked.kda, tensors, (130,))
    assert torch.equal(out, wanted)
    for name, grad, reference in zip(NAMES[:5], grads, wanted_grads, strict=False):
        assert torch.equal(grad, reference), name


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(2, 6, 8, dtype=torch.float64), r"shape \(2, 6, 8\) of torch.float64"),
        (torch.zeros(2, 8, 6), r"\(2, 8, 6\) of torch.float32; legal .* of torch.float64, or None"),
    ],
)
def test_a_state_that_does_not_fit_is_named(state: torch.Tensor, message: str) -> None:
    for kernel in (chunked, recurrent, kernels.kda.fla):
        with pytest.raises(ValueError, match=message):
            kernel.kda_piece(*inputs((4,)), (4,), state, lower_bound=BOUND)


@pytest.mark.parametrize(
    ("lengths", "continued", "carries", "calls"),
    [
        ((5, 6, 7), False, False, [(5, 6, 7)]),
        ((5, 6, 7), True, False, [(5,), (6, 7)]),
        ((5, 6, 7), False, True, [(5, 6), (7,)]),
        ((5, 6, 7, 8), True, True, [(5,), (6, 7), (8,)]),
        ((5, 6), True, True, [(5,), (6,)]),
        ((5,), True, True, [(5,)]),
        ((5,), False, False, [(5,)]),
    ],
)
def test_only_cut_documents_meet_states_in_flas_kernels(
    lengths: tuple[int, ...], continued: bool, carries: bool, calls: list[tuple[int, ...]]
) -> None:
    assert split_calls(lengths, continued, carries) == calls
