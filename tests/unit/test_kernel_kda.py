"""KDA in chunks against the recurrence: outputs, every gradient, ragged documents, range."""

import math
import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.kda.fla
from kernels.fla_package import SWITCH, switch_off_flash_kda
from kernels.kda import chunked, chunks, recurrent
from kernels.packed import bound_tensors
from tests.unit.kda_support import BOUND, NAMES, Kda, inputs, run

RAGGED = (1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 2)


def assert_near(
    found: torch.Tensor, wanted: torch.Tensor, share: float, name: str, least: float = 0
) -> None:
    """Within ``share`` of the largest element of ``wanted``, or of ``least`` if that is larger."""
    error = (found.double() - wanted.double()).abs().max().item()
    size = max(wanted.double().abs().max().item(), least)
    assert error <= share * size, f"{name}: off by {error:.2e} where the largest is {size:.2e}"


def test_the_recurrence_by_hand() -> None:
    """Two tokens, keys of 2 channels along the axes, values of 3: decay acts on the key axis."""
    lower_bound, A_log, dt_bias = -4.0, math.log(2.0), (0.5, -1.0)
    raw = ((0.0, 0.0), (0.25, 3.0))
    fade = [
        math.exp(lower_bound / (1 + math.exp(-2.0 * (x + b))))
        for x, b in zip(raw[1], dt_bias, strict=True)
    ]
    v = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 5.0]], dtype=torch.float64)
    key = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    query = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    beta = torch.tensor([[0.5], [0.25]], dtype=torch.float64)
    unit = 1 / math.sqrt(1 + 1e-6)
    first = 0.5 * unit * v[0]  # the row of the state for channel 0; channel 1 stays empty
    faded = fade[0] * first
    second = faded + unit * 0.25 * (v[1] - unit * faded)
    expected = torch.stack([unit * first, 3 / math.sqrt(25 + 1e-6) * second]) / math.sqrt(2)
    out = recurrent.kda(
        query.unsqueeze(1), key.unsqueeze(1), v.unsqueeze(1),
        torch.tensor(raw, dtype=torch.float64).unsqueeze(1), beta,
        torch.tensor([A_log], dtype=torch.float64), torch.tensor(dt_bias, dtype=torch.float64),
        (2,), lower_bound=lower_bound,
    )  # fmt: skip
    torch.testing.assert_close(out.squeeze(1), expected)


@pytest.mark.parametrize("lengths", [RAGGED, (1,), (16,), (130,)], ids=str)
@pytest.mark.parametrize(("heads", "dk", "dv"), [(2, 8, 6), (1, 5, 7), (3, 4, 16)])
@pytest.mark.parametrize("segment", [1, 3, chunked.SEGMENT])
def test_outputs_and_gradients_equal_the_recurrence(
    lengths: tuple[int, ...],
    heads: int,
    dk: int,
    dv: int,
    segment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "SEGMENT", segment)
    tensors = inputs(lengths, heads, dk, dv)
    out, grads = run(chunked.kda, tensors, lengths)
    wanted, wanted_grads = run(recurrent.kda, tensors, lengths)
    assert_near(out, wanted, 1e-13, "output")
    for name, grad, reference in zip(NAMES, grads, wanted_grads, strict=True):
        # The gate of a document's first token has no effect, and a gradient of rounding alone.
        assert_near(grad, reference, 1e-12, name, least=1)


@pytest.mark.parametrize("bound", [-5.0, -1.0, -0.01])
def test_float32_loses_no_more_than_its_rounding(bound: float) -> None:
    tensors = inputs(RAGGED, dtype=torch.float32)
    out, grads = run(chunked.kda, tensors, RAGGED, bound)
    wanted, wanted_grads = run(recurrent.kda, [x.double() for x in tensors], RAGGED, bound)
    assert out.dtype == torch.float32
    assert_near(out, wanted, 2e-6, "output")
    for name, grad, reference in zip(NAMES, grads, wanted_grads, strict=True):
        assert_near(grad, reference, 1e-5, name)


def test_low_precision_inputs_are_computed_in_float32_and_rounded_at_the_end() -> None:
    tensors = inputs(RAGGED, dtype=torch.bfloat16)
    out, grads = run(chunked.kda, tensors, RAGGED)
    wanted, wanted_grads = run(recurrent.kda, [x.double() for x in tensors], RAGGED)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=1e-5)
    for name, grad, given, reference in zip(NAMES, grads, tensors, wanted_grads, strict=True):
        assert grad.dtype == given.dtype
        assert_near(grad, reference, 2**-6, name)  # the upstream gradient is bfloat16 as well


def test_gradients_agree_with_finite_differences() -> None:
    lengths = (1, 3, 17)
    tensors = [x.requires_grad_() for x in inputs(lengths, 1, 2, 3)]
    assert torch.autograd.gradcheck(
        lambda *x: chunked.kda(*x, lengths, lower_bound=BOUND), tensors, fast_mode=True
    )


@pytest.mark.parametrize("A_log", [-30.0, 3.0, 20.0, 88.0, 200.0])
@pytest.mark.parametrize("raw", [-50.0, 0.0, 50.0])
def test_saturated_gates_stay_finite_and_right(A_log: float, raw: float) -> None:
    lengths = (40, 7)
    tensors = inputs(lengths, dtype=torch.float32)
    tensors[3] = torch.full_like(tensors[3], raw)
    tensors[3][::3] *= -1
    tensors[5] = torch.full_like(tensors[5], A_log)
    tensors[6] = torch.zeros_like(tensors[6])
    out, grads = run(chunked.kda, tensors, lengths)
    wanted, wanted_grads = run(recurrent.kda, tensors, lengths)
    assert_near(out, wanted, 2e-6, "output")
    for name, grad, reference in zip(NAMES, grads, wanted_grads, strict=True):
        assert grad.isfinite().all(), name
        assert_near(grad, reference, 1e-5, name)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_gradients_through_saturated_gates_scale_with_what_comes_in(size: float) -> None:
    """Over 16 tokens at the bound, e^-80 and e^80 meet; neither may swallow the gradient."""
    lengths = (48,)
    tensors = inputs(lengths, dtype=torch.float32)
    tensors[3] = torch.full_like(tensors[3], 30.0)
    upstream = torch.randn(48, 2, 6, generator=torch.Generator().manual_seed(3))
    _, grads = run(chunked.kda, tensors, lengths, upstream=size * upstream)
    doubles = [x.double() for x in tensors]
    _, wanted = run(recurrent.kda, doubles, lengths, upstream=size * upstream.double())
    for name, grad, reference in zip(NAMES[:3] + NAMES[4:5], grads[:3] + grads[4:5],
                                     wanted[:3] + wanted[4:5], strict=True):  # fmt: skip
        assert_near(grad, reference, 1e-5, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 100])
def test_later_tokens_change_nothing_before_them(length: int, dtype: torch.dtype) -> None:
    whole = inputs((130,), dk=16, dv=16, dtype=dtype)
    whole[3][length:] += 4
    out = chunked.kda(*whole, (130,), lower_bound=BOUND)
    prefix = [x[:length] for x in whole[:5]] + whole[5:]
    assert torch.equal(chunked.kda(*prefix, (length,), lower_bound=BOUND), out[:length])


def pieces(x: torch.Tensor, lengths: tuple[int, ...], order: list[int]) -> torch.Tensor:
    split = x.split(lengths)
    return torch.cat([split[i] for i in order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_documents_changes_no_bit(dtype: torch.dtype) -> None:
    lengths = (70, 3, 16, 1, 200, 33)
    order = [4, 1, 5, 0, 3, 2]
    tensors = inputs(lengths, dk=16, dv=8, dtype=dtype)
    moved = [pieces(x, lengths, order) for x in tensors[:5]] + tensors[5:]
    upstream = torch.randn(sum(lengths), 2, 8, generator=torch.Generator().manual_seed(5))
    out, grads = run(chunked.kda, tensors, lengths, upstream=upstream)
    moved_out, moved_grads = run(
        chunked.kda, moved, tuple(lengths[i] for i in order),
        upstream=pieces(upstream, lengths, order),
    )  # fmt: skip
    assert torch.equal(moved_out, pieces(out, lengths, order))
    for name, grad, other in zip(NAMES[:5], grads, moved_grads, strict=False):
        assert torch.equal(other, pieces(grad, lengths, order)), name


def test_a_document_has_the_same_bits_alone_and_beside_nan() -> None:
    lengths = (21, 100, 1100, 5)
    tensors = inputs(lengths, dk=16, dv=8, dtype=torch.float32)
    upstream = torch.randn(sum(lengths), 2, 8, generator=torch.Generator().manual_seed(5))
    for x in tensors[:5]:
        x[:21], x[-5:] = torch.nan, torch.inf
    out, grads = run(chunked.kda, tensors, lengths, upstream=upstream)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        if length in (21, 5):
            continue
        alone = [x[rows] for x in tensors[:5]] + tensors[5:]
        alone_out, alone_grads = run(chunked.kda, alone, (length,), upstream=upstream[rows])
        assert torch.equal(alone_out, out[rows])
        for name, grad, other in zip(NAMES[:5], grads, alone_grads, strict=False):
            assert torch.equal(other, grad[rows]), name


def test_kept_for_backward_are_the_inputs_and_a_state_per_segment() -> None:
    lengths = (100, 60)
    tensors = [x.requires_grad_() for x in inputs(lengths, dtype=torch.bfloat16)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        chunked.kda(*tensors, lengths, lower_bound=BOUND)
    own = {x.data_ptr() for x in tensors}
    others = [x for x in kept if x.data_ptr() not in own]
    assert [tuple(x.shape) for x in others] == [(1, 2, 8, 6)]


class Sizes(TorchDispatchMode):
    """The elements of the largest tensor that any operation returns, per first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.ndim:
                self.largest[len(x)] = max(self.largest.get(len(x), 0), x.numel())
        return result


@pytest.mark.parametrize("lengths", [(1600,), (7,) * 100], ids=["long", "many"])
def test_intermediates_do_not_grow_with_the_length(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "SEGMENT", 4)
    tokens, heads, width = sum(lengths), 2, 8
    tensors = inputs(lengths, heads, width, width, dtype=torch.float32)
    with Sizes() as sizes:
        run(chunked.kda, tensors, lengths)
    segment = 4 * chunks.CHUNK * heads * max(width, chunks.CHUNK)
    states = -(-sum(-(-length // chunks.CHUNK) for length in lengths) // 4)
    grown = {
        rows: size
        for rows, size in sizes.largest.items()
        if size > segment and rows not in (tokens, states)
    }
    assert not grown
    assert sizes.largest[tokens] == tokens * heads * width
    assert sizes.largest[states] <= max(states * heads * width**2, segment)


def test_autocast_does_not_reach_the_products() -> None:
    tensors = inputs(RAGGED, dtype=torch.float32)
    out, grads = run(chunked.kda, tensors, RAGGED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_out, cast_grads = run(chunked.kda, tensors, RAGGED)
    assert torch.equal(out, cast_out)
    assert all(map(torch.equal, grads, cast_grads))


def test_views_and_an_expanded_upstream_gradient_are_taken() -> None:
    lengths = (20, 13)
    tensors = inputs(lengths)
    joined = torch.cat([x.flatten(1) for x in tensors[:2]], dim=1)
    views = [x.view(33, 2, 8) for x in joined.split(16, dim=1)]
    upstream = torch.ones((), dtype=torch.float64).expand(33, 2, 6)
    leaves = [x.detach().requires_grad_() for x in [*views, *tensors[2:]]]
    found = chunked.kda(*leaves, lengths, lower_bound=BOUND)
    out, grads = run(chunked.kda, tensors, lengths, upstream=upstream)
    assert torch.equal(found, out)
    for grad, other in zip(torch.autograd.grad(found.sum(), leaves), grads, strict=True):
        assert torch.equal(grad, other)


def zeros(**changes: Any) -> dict[str, Any]:
    """Arguments of 6 tokens, 2 heads, 16 and 8 wide."""
    arguments: dict[str, Any] = {
        "q": torch.zeros(6, 2, 16), "k": torch.zeros(6, 2, 16), "v": torch.zeros(6, 2, 8),
        "raw_gate": torch.zeros(6, 2, 16), "beta": torch.zeros(6, 2), "A_log": torch.zeros(2),
        "dt_bias": torch.zeros(32), "lengths": (2, 4), "lower_bound": BOUND,
    }  # fmt: skip
    return arguments | changes


@pytest.mark.parametrize("kda", [recurrent.kda, chunked.kda, kernels.kda.fla.kda])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lower_bound": -5.1}, r"lower_bound \(model.gate_lower_bound\): -5.1; legal: .* -5.0"),
        ({"lower_bound": 0.0}, r"lower_bound \(model.gate_lower_bound\): 0.0; .*below 0"),
        ({"k": torch.zeros(6, 2, 8)}, r"k: shape \(6, 2, 8\); legal .*: \(6, 2, 16\)"),
        ({"v": torch.zeros(5, 2, 8)}, r"v: shape \(5, 2, 8\); legal .*: \(6, 2, 8\)"),
        ({"raw_gate": torch.zeros(6, 32)}, r"raw_gate: shape \(6, 32\)"),
        ({"beta": torch.zeros(6, 2, 1)}, r"beta: shape \(6, 2, 1\); legal .*: \(6, 2\)"),
        ({"A_log": torch.zeros(1)}, r"A_log: shape \(1,\); legal .*: \(2,\)"),
        ({"dt_bias": torch.zeros(2, 16)}, r"dt_bias: shape \(2, 16\); legal .*: \(32,\)"),
        ({"lengths": (2, 5)}, r"lengths: \(2, 5\), 2 documents of 7 tokens; legal: .* 6 tokens"),
        ({"lengths": (0, 6)}, r"each of 1 token or more"),
    ],
)
def test_what_does_not_fit_is_named(kda: Kda, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kda(**zeros(**changes))


def test_flas_kernels_refuse_a_tensor_that_is_not_on_cuda() -> None:
    with pytest.raises(ValueError, match="model.kda_kernel: 'fla' runs on CUDA only, and q is on"):
        kernels.kda.fla.kda(**zeros())


def test_flash_kda_is_off_unless_someone_turned_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    switch_off_flash_kda()
    monkeypatch.delenv(SWITCH)
    switch_off_flash_kda()
    assert os.environ[SWITCH] == "0"
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(ValueError, match="FLA_FLASH_KDA: '1' .*legal: '0' or unset"):
        switch_off_flash_kda()


def test_bounds_are_the_same_objects_and_never_those_of_inference_mode() -> None:
    device = torch.device("cpu")
    with torch.inference_mode():
        assert bound_tensors((3, 1, 4), device)[0].is_inference()
    on_device, host = bound_tensors((3, 1, 4), device)
    assert not on_device.is_inference()
    assert host.tolist() == [0, 3, 4, 8] and host.dtype == torch.int32
    assert bound_tensors((3, 1, 4), device)[0] is on_device
