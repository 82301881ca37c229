"""On a GPU: the streams' kernels equal their definition in float64, values and every gradient.

Run with `make test ARGS="-m gpu"`.
"""

import pytest
import torch
import torchtitan.tools.utils

from components.models.glm_flash.hyper_connections import HyperConnection
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.trimmed import trim
from kernels.hyper_connections import fused, naive, op
from kernels.hyper_connections.merge import merge_reference
from kernels.hyper_connections.naive import Constants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

CONSTANTS = Constants(norm_eps=1e-5, eps=1e-6, iterations=20)
PUBLISHED = 4096


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    random = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=random, device="cuda").to(dtype)


def inputs(tokens: int, n: int, dim: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Streams, weight, terms, a mixer's output; streams of unlike size, as training makes them."""
    m = n * (n + 2)
    streams = draw(tokens, n, dim, seed=seed) * draw(tokens, n, 1, seed=seed + 1).exp()
    fn = draw(m, n * dim, seed=seed + 2) * (n * dim) ** -0.5
    terms = draw(2, m, seed=seed + 3)
    return [streams.to(dtype), fn.to(dtype), terms, draw(tokens, dim, seed=seed + 4).to(dtype)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape and not found.isnan().any()
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


ONE_ROUNDING = {torch.bfloat16: 2.5e-3, torch.float32: 5e-6}
SUMS = {torch.bfloat16: 3e-5, torch.float32: 5e-6}
"""Of what is never rounded: a tensor core cuts digits off while it adds."""
SHAPES = [(1, 4, PUBLISHED), (257, 4, PUBLISHED), (4133, 4, PUBLISHED), (2048, 4, 520),
          (63, 2, 1000), (1030, 4, 8), (3, 2, 8)]  # fmt: skip


@pytest.mark.parametrize(("tokens", "n", "dim"), SHAPES)
@pytest.mark.parametrize(
    ("dtype", "held"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]
)
def test_mapping_and_reading(tokens: int, n: int, dim: int, dtype: torch.dtype, held: bool) -> None:
    streams, fn, terms, dx = inputs(tokens, n, dim, dtype)
    exact = [t.double() for t in (streams, fn, terms)]
    found, wanted = (
        op.map_and_read(streams, fn, terms, CONSTANTS),
        naive.map_and_read(exact[0], exact[1], exact[2], CONSTANTS),
    )
    bound = ONE_ROUNDING[dtype]
    assert relative(found.x, wanted.x) < bound
    for name in ("post", "mix", "z", "norm"):
        assert relative(getattr(found, name), getattr(wanted, name)) < SUMS[dtype], name

    dpost, dmix = draw(tokens, n, seed=11), draw(tokens, n, n, seed=12)
    dheld = draw(tokens, n, dim, seed=13).to(dtype) if held else None
    grads = op.map_and_read_backward(
        dx, dpost, dmix, dheld, streams, fn, terms, found.z, found.norm, CONSTANTS, of_weight=True
    )
    expected = naive.map_and_read_backward(
        *(t.double() for t in (dx, dpost, dmix)), None if dheld is None else dheld.double(),
        *exact, wanted.z, wanted.norm, CONSTANTS,
    )  # fmt: skip
    for name, one, other in zip(("streams", "fn", "terms"), grads, expected, strict=True):
        assert relative(one, other) < (5 * SUMS[dtype] if name == "terms" else bound), name


@pytest.mark.parametrize("dtype", ONE_ROUNDING, ids=str)
@pytest.mark.parametrize(("tokens", "n", "dim"), SHAPES)
def test_merging(tokens: int, n: int, dim: int, dtype: torch.dtype) -> None:
    streams, _, _, out = inputs(tokens, n, dim, dtype)
    post, mix = draw(tokens, n, seed=5).sigmoid(), draw(tokens, n, n, seed=6).softmax(-1)
    grad = draw(tokens, n, dim, seed=7).to(dtype)
    exact = [streams.double(), out.double(), *(t.to(dtype).double() for t in (post, mix))]
    bound = ONE_ROUNDING[dtype]
    assert relative(op.merge(streams, out, post, mix), merge_reference(*exact)) < bound
    found = op.merge_backward(grad, streams, out, post, mix)
    wanted = naive.merge_backward(grad.double(), *exact)
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == (dtype if index < 2 else torch.float32)
        assert relative(one, other) < (bound if index < 2 else SUMS[dtype]), index


def site(given: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in given]
    x, held, post, mix = fused.map_and_read(*leaves[:3], CONSTANTS)
    merged = fused.merge(held, leaves[3], post, mix)
    # What a mixer makes of ``x`` goes back through it as well.
    found = torch.autograd.grad((merged, x), leaves, (grad, grad[:, 0].contiguous()))
    return [x.detach(), merged.detach(), *found]


def test_two_runs_are_equal_to_the_bit() -> None:
    given = inputs(3001, 4, PUBLISHED, torch.bfloat16)
    grad = draw(3001, 4, PUBLISHED, seed=9).bfloat16()
    for one, other in zip(site(given, grad), site(given, grad), strict=True):
        assert torch.equal(one, other)


def test_memory_that_was_never_written_has_no_part_in_results() -> None:
    given = inputs(1029, 4, 1000, torch.bfloat16)
    grad = draw(1029, 4, 1000, seed=9).bfloat16()
    poison = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(64)]
    del poison
    assert not any(t.isnan().any() for t in site(given, grad))


def test_kernels_reach_beyond_two_to_the_31() -> None:
    """A token's results do not depend on where it is in a batch."""
    tokens, few = 2**31 // (4 * PUBLISHED) + 129, 65
    streams = torch.zeros(tokens, 4, PUBLISHED, dtype=torch.bfloat16, device="cuda")
    last, fn, terms, out = inputs(few, 4, PUBLISHED, torch.bfloat16)
    streams[-few:] = last
    outs = torch.zeros(tokens, PUBLISHED, dtype=torch.bfloat16, device="cuda")
    outs[-few:] = out
    grad = torch.zeros_like(streams)
    grad[-few:] = draw(few, 4, PUBLISHED, seed=8).bfloat16()
    found = site([streams, fn, terms, outs], grad)
    wanted = site([last, fn, terms, out], grad[-few:].clone())
    for index in (0, 1, 2, 5):  # x, merged, and their gradients
        assert torch.equal(found[index][-few:], wanted[index]), index
    for index in (3, 4):  # of the weight and the terms, summed over all
        assert relative(found[index], wanted[index].double()) < 5e-3, index


def part(kind: str) -> HyperConnection:
    """A site of the published model, with bfloat16 weights."""
    model = GlmFlashModel(
        vocab_size=512, n_layers=1, layer_types=["kda"], n_dense_layers=1, n_experts=None
    )
    config = model.build_spec().model
    if kind != "plain":
        trim(config, "hyper_connections")
    made = config.layers[0].attention_hc
    if kind == "fused":
        from components.models.glm_flash.fused_connections import triton_hyper_connections

        made = triton_hyper_connections(made)
    with torch.device("cuda"):
        built = made.build()
    built.init_states(buffer_device=torch.device("cuda"))
    built.fn.data = draw(*built.fn.shape, seed=2).bfloat16() * 0.02
    built.affine.base.data = draw(*built.affine.base.shape, seed=3)
    return built


def step(kind: str, streams: torch.Tensor, grad: torch.Tensor) -> tuple[dict, int]:
    """Results, gradients, and the most bytes above what was there before."""
    made, streams = part(kind), streams.detach().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x, held, post, mix = made(streams)
    merged = made.write(held, x * 2, post, mix)
    merged.backward(grad)
    peak = torch.cuda.max_memory_allocated() - before
    grads = {name: p.grad for name, p in made.named_parameters()}
    return {"merged": merged.detach(), "streams": streams.grad, **grads}, peak


def test_a_site_of_the_model_equals_the_plain_one_and_needs_less() -> None:
    tokens = 8191
    streams = draw(1, tokens, 4, PUBLISHED, seed=1).bfloat16()
    grad = draw(1, tokens, 4, PUBLISHED, seed=4).bfloat16()
    step("fused", streams, grad)  # compiles
    found, peak = step("fused", streams, grad)
    plain, plain_peak = step("plain", streams, grad)
    _, trimmed_peak = step("trimmed", streams, grad)
    assert found.keys() == plain.keys()
    for name, wanted in plain.items():
        assert relative(found[name], wanted.double()) < 2e-2, name
    assert peak < trimmed_peak < plain_peak
    # Merged streams, two gradients of streams, x, its double and their gradients, and small change.
    boundary = streams.nbytes
    assert peak < 3 * boundary + boundary + 64 * 2**20
