"""On a GPU: fla's KDA and convolution against the plain ones (`make test ARGS="-m gpu"`).

fla tunes its kernels for every number of heads, width and dtype that it meets, minutes each time,
so there are few of them here. Triton keeps the results where TRITON_CACHE_AUTOTUNING=1 is set.
"""

import pytest
import torch
import torchtitan.tools.utils

import kernels.kda.fla
import kernels.short_conv.fla
from kernels.kda import chunked
from kernels.packed import bounds
from kernels.short_conv import naive
from tests.unit.kda_support import BOUND, NAMES, inputs, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

RAGGED = (1, 3, 4, 5, 63, 64, 65, 129, 300, 17, 16, 250, 83)

SHARES = {torch.bfloat16: (1e-2, 2e-2), torch.float32: (2e-3, 5e-3)}
"""Root mean square error of outputs and of gradients, as a share of what is right. float32 is
multiplied in TF32, with two bits more than bfloat16."""


def on_cuda(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.cuda() for x in tensors]


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def assert_near(found: torch.Tensor, wanted: torch.Tensor, share: float, name: str) -> None:
    assert found.isfinite().all(), name
    error, size = rms(found.double() - wanted), rms(wanted)
    assert error <= share * size, f"{name}: off by {error:.2e} (rms) of {size:.2e}"


def assert_near_in_every_document(
    found: torch.Tensor,
    wanted: torch.Tensor,
    lengths: tuple[int, ...],
    share: float,
    name: str,
) -> None:
    """An error in one short document must not hide behind many right ones."""
    starts, size = bounds(lengths), rms(wanted)
    for start, stop in zip(starts, starts[1:], strict=False):
        error = rms(found[start:stop].double() - wanted[start:stop])
        least = share * max(size, rms(wanted[start:stop]))
        assert error <= least, f"{name} of tokens {start} to {stop}: off by {error:.2e} (rms)"


@pytest.mark.parametrize(
    ("heads", "dk", "dv", "dtype"),
    [
        (4, 128, 128, torch.bfloat16),
        (4, 128, 128, torch.float32),
        (64, 128, 128, torch.bfloat16),
        (4, 64, 128, torch.bfloat16),
    ],
    ids=str,
)
def test_fla_equals_the_chunks_in_float64(heads: int, dk: int, dv: int, dtype: torch.dtype) -> None:
    tensors = on_cuda(inputs(RAGGED, heads, dk, dv, dtype))
    out, grads = run(kernels.kda.fla.kda, tensors, RAGGED)
    wanted, wanted_grads = run(chunked.kda, [x.double() for x in tensors], RAGGED)
    of_output, of_gradients = SHARES[dtype]
    assert out.dtype == dtype
    assert_near(out, wanted, of_output, "output")
    assert_near_in_every_document(out, wanted, RAGGED, of_output, "output")
    for name, grad, given, reference in zip(NAMES, grads, tensors, wanted_grads, strict=True):
        assert grad.dtype == given.dtype and grad.shape == given.shape, name
        assert_near(grad, reference, of_gradients, name)
        if len(grad) == len(out):
            assert_near_in_every_document(grad, reference, RAGGED, 2 * of_gradients, name)


@pytest.mark.parametrize("raw", [-50.0, 50.0])
@pytest.mark.parametrize("A_log", [3.0, 20.0])
def test_fla_keeps_saturated_gates_finite(A_log: float, raw: float) -> None:
    tensors = inputs(RAGGED, 4, 128, 128, torch.bfloat16)
    tensors[3] = torch.full_like(tensors[3], raw)
    tensors[3][::3] *= -1
    tensors[5] = torch.full_like(tensors[5], A_log)
    tensors = on_cuda(tensors)
    out, grads = run(kernels.kda.fla.kda, tensors, RAGGED)
    wanted, wanted_grads = run(chunked.kda, [x.double() for x in tensors], RAGGED)
    assert_near(out, wanted, 1e-2, "output")
    for name, grad, reference in zip(NAMES, grads, wanted_grads, strict=True):
        assert grad.isfinite().all(), name
        if name in ("q", "k", "v", "beta"):
            assert_near(grad, reference, 2e-2, name)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 100, 500])
def test_fla_lets_later_tokens_change_nothing_before_them(length: int) -> None:
    whole = on_cuda(inputs((1000,), 4, 128, 128, torch.bfloat16))
    whole[3][length:] += 4
    out = kernels.kda.fla.kda(*whole, (1000,), lower_bound=BOUND)
    prefix = [x[:length] for x in whole[:5]] + whole[5:]
    assert torch.equal(kernels.kda.fla.kda(*prefix, (length,), lower_bound=BOUND), out[:length])


def test_fla_computes_a_document_the_same_alone_and_packed() -> None:
    tensors = on_cuda(inputs(RAGGED, 4, 128, 128, torch.bfloat16))
    packed = kernels.kda.fla.kda(*tensors, RAGGED, lower_bound=BOUND)
    starts = bounds(RAGGED)
    for start, stop in zip(starts, starts[1:], strict=False):
        alone = [x[start:stop] for x in tensors[:5]] + tensors[5:]
        out = kernels.kda.fla.kda(*alone, (stop - start,), lower_bound=BOUND)
        assert torch.equal(out, packed[start:stop]), f"tokens {start} to {stop}"


def test_fla_computes_the_same_without_gradients() -> None:
    """What a checkpoint's first pass computes is what its recomputation differentiates."""
    tensors = on_cuda(inputs(RAGGED, 4, 128, 128, torch.bfloat16))
    with torch.no_grad():
        first = kernels.kda.fla.kda(*tensors, RAGGED, lower_bound=BOUND)
    again, _ = run(kernels.kda.fla.kda, tensors, RAGGED)
    assert torch.equal(first, again)
    from fla.ops.kda.backends.flash_kda import FlashKDABackend

    assert not FlashKDABackend().is_enabled()


def test_a_forward_pass_of_inference_mode_does_not_keep_training_from_saving_its_bounds() -> None:
    tensors = on_cuda(inputs((40, 24), 4, 128, 128, torch.bfloat16))
    with torch.inference_mode():
        first = kernels.kda.fla.kda(*tensors, (40, 24), lower_bound=BOUND)
    again, _ = run(kernels.kda.fla.kda, tensors, (40, 24))
    assert torch.equal(first, again)


def test_the_chunks_compute_the_same_on_both_devices() -> None:
    tensors = inputs(RAGGED, 4, 32, 16)
    out, grads = run(chunked.kda, on_cuda(tensors), RAGGED)
    wanted, wanted_grads = run(chunked.kda, tensors, RAGGED)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-9, atol=1e-12)
    for name, grad, reference in zip(NAMES, grads, wanted_grads, strict=True):
        torch.testing.assert_close(
            grad.cpu(), reference, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("channels", [512, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flas_convolution_equals_the_plain_one(channels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(RAGGED), channels, generator=generator).to(dtype).cuda()
    weight = torch.randn(channels, 1, 4, generator=generator).cuda()
    upstream = torch.randn(x.shape, generator=generator).to(dtype).cuda()
    position = torch.cat([torch.arange(length) for length in RAGGED]).cuda()
    results = []
    for short_conv, wide in ((kernels.short_conv.fla.short_conv, dtype), (naive.short_conv, None)):
        leaves = [t.detach().to(wide or torch.float64).requires_grad_() for t in (x,)]
        leaves.append(weight.detach().clone().requires_grad_())
        out = short_conv(*leaves, position, RAGGED)
        results.append([out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))])
    (out, grad_x, grad_weight), (wanted, wanted_x, wanted_weight) = results
    step = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert out.dtype == grad_x.dtype == dtype and grad_weight.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, rtol=step, atol=step / 10)
    # fla rounds the sums before it takes SiLU's derivative.
    assert_near(grad_x, wanted_x, 2 * step, "x")
    assert_near_in_every_document(grad_x, wanted_x, RAGGED, 4 * step, "x")
    assert_near(grad_weight, wanted_weight.double(), 2 * step, "weight")


def test_documents_of_other_lengths_compile_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of 65,536-row blocks that have not been there, in pieces with states and without."""
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda *, fn, **_: compiled.append(fn.name)
    )

    def train(tokens: int) -> None:
        tensors = [x.cuda() for x in inputs((tokens,), 64, 128, 128, torch.bfloat16)]
        run(kernels.kda.fla.kda, tensors, (tokens,))

    train(700)
    compiled.clear()
    for tokens in (1500, 2500, 3500):
        train(tokens)
    assert not compiled
