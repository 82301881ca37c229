"""On a GPU: parts of GLM-5.3-Flash in chunks at true widths, in bfloat16 with fla's kernels.

fla tunes its kernels for minutes before the first results.
"""

import pytest
import torch
import torchtitan.tools.utils

import kernels.kda.fla
from kernels.kda import chunked
from tests.benchmarks.case import Size
from tests.benchmarks.cases.sublayer_chunking import (
    KINDS,
    Inputs,
    layer_of,
    make_inputs,
    reference,
    step,
)
from tests.benchmarks.harness import relative_error
from tests.gpu.test_gpu_kda import SHARES, assert_near, on_cuda
from tests.unit.kda_support import BOUND, NAMES, inputs, run
from tests.unit.test_kernel_kda_pieces import CUTS, LENGTHS, in_pieces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

WORKING_SET = 16 * 2**30
"""Bytes that a layer may need at 131,072 tokens."""

SLOWER = 1.05
"""Time of a part in chunks over its time whole; parts are not all of a step."""


@pytest.mark.parametrize("cuts", CUTS)
def test_flas_pieces_equal_the_whole_in_float64(cuts: str) -> None:
    tensors = on_cuda(inputs(LENGTHS, 4, 128, 128, torch.bfloat16))
    out, grads = run(in_pieces(kernels.kda.fla, CUTS[cuts]), tensors, LENGTHS)
    wanted, wanted_grads = run(chunked.kda, [x.double() for x in tensors], LENGTHS)
    of_output, of_gradients = SHARES[torch.bfloat16]
    assert_near(out, wanted, of_output, "output")
    for name, grad, given, reference_ in zip(NAMES, grads, tensors, wanted_grads, strict=True):
        assert grad.dtype == given.dtype and grad.shape == given.shape, name
        assert_near(grad, reference_, of_gradients, name)


def test_flas_state_and_its_gradient_equal_the_chunks_in_float64() -> None:
    lengths = (70, 3, 50)
    tensors = on_cuda(inputs(lengths, 4, 128, 128, torch.bfloat16))
    draw = torch.Generator(device="cuda").manual_seed(4)
    state, pull = (torch.randn(4, 128, 128, generator=draw, device="cuda") for _ in "sp")
    found = []
    for kernel, wide in ((kernels.kda.fla, False), (chunked, True)):
        given = [x.double() if wide else x for x in (*tensors, state)]
        leaves = [x.clone().requires_grad_() for x in given]
        out, left = kernel.kda_piece(
            *leaves[:7], lengths, leaves[7], lower_bound=BOUND, carries=True
        )
        total = (left * pull.to(left.dtype)).sum() + out.to(left.dtype).sum()
        found.append([out, left, *torch.autograd.grad(total, leaves)])
    for name, actual, wanted in zip(("out", "left", *NAMES, "state"), *found, strict=True):
        assert_near(actual.detach(), wanted.detach(), 2e-2, name)


def case_inputs(kind: str, tokens: int, stage: str) -> Inputs:
    shape = {"T": tokens, "D": 4096, kind: 1, "wide": 1}
    return make_inputs(Size(shape=shape, dtype="bfloat16"), "cuda", 0, stage)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_as_close_to_float64_as_the_whole(kind: str) -> None:
    """Two documents of odd length, cut in both; every gradient."""
    given = case_inputs(kind, 4096, "gate")
    exact = {name: value.cpu() for name, value in reference(given).items()}
    errors = {}
    for chunk_tokens in (None, 1024):
        found = step(layer_of(given, chunk_tokens, torch.bfloat16), given)
        assert found.keys() == exact.keys()
        errors[chunk_tokens] = {n: relative_error(found[n].cpu(), exact[n]) for n in exact}
    for name, error in errors[1024].items():
        print(f"{kind} {name:30} whole {errors[None][name]:.2e}  in chunks {error:.2e}")
        assert error <= 1.5 * errors[None][name] + 3e-3, name
    assert max(errors[1024].values()) < 5e-2


def measure(given: Inputs, chunk_tokens: int | None) -> tuple[float, int]:
    """Milliseconds of the best of three runs, and bytes at the peak beyond input and weights."""
    layer = layer_of(given, chunk_tokens, torch.bfloat16)
    step(layer, given)
    layer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resident, times = torch.cuda.memory_allocated(), []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        step(layer, given)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times), torch.cuda.max_memory_allocated() - resident


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_needs_16_gib_at_most_at_131072_tokens_and_hardly_more_time(kind: str) -> None:
    time, peak = measure(case_inputs(kind, 131072, "timing"), 16384)
    print(f"{kind}: {time:.0f} ms, {peak / 2**30:.1f} GiB at 131,072 tokens in chunks of 16,384")
    assert peak <= WORKING_SET
    # Whole, a KDA part of 131,072 tokens may not fit.
    given = case_inputs(kind, 65536, "timing")
    (time, peak), (whole, most) = measure(given, 16384), measure(given, None)
    print(f"{kind}: {time:.0f} ms, {peak / 2**30:.1f} GiB; whole {whole:.0f}, {most / 2**30:.1f}")
    assert peak < 0.6 * most
    assert time <= SLOWER * whole
