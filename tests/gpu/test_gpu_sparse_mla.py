"""On a Hopper GPU: the sparse attention kernels against their twin (`make test ARGS="-m gpu"`).

As FlashAttention's tests do, errors are measured against float32 and may be twice those of plain
torch in bfloat16.
"""

from typing import Any

import pytest
import torch
import torchtitan.tools.utils

from kernels.dsa.keys import selected_tokens
from kernels.sparse_mla import naive, tuned
from kernels.sparse_mla.bench import OnGpu
from kernels.sparse_mla.inputs import Inputs, draw_inputs, spread_pools
from kernels.sparse_mla.tilelang_backward import backward
from kernels.sparse_mla.tilelang_forward import forward
from kernels.sparse_mla.tune import GLM, Plan
from kernels.sparse_mla.walk import Walk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

SETTINGS: dict[str, Any] = {"size": 4, "scale": 1 / 16}
SHORT = (1, 2, 3, 4, 5, 1, 1, 4, 3, 2, 7, 63, 64, 65)
RAGGED = (*SHORT, 301, 1023)
NAMES = ("out", "lse", "dq", "dlatent", "mass")
FORMS = [("split", "lines"), ("split", "quads"), ("split", "pairs"), ("simple", "pairs")]
forms = pytest.mark.parametrize(("variant", "scatter"), FORMS)
BOTH = Walk(in_phase=True, range_tokens=600)
WALKS = [Walk(in_phase=True), Walk(range_tokens=333), Walk(range_tokens=10**6), BOTH]
walks = pytest.mark.parametrize("walk", WALKS, ids=str)


def kernels(p: Inputs, variant: str, scatter: str | None, **more: Any) -> list[torch.Tensor]:
    """What ``NAMES`` lists; the gradient of the latent is added to ones."""
    settings = SETTINGS | more
    only_backward = {key: settings.pop(key) for key in ("deterministic", "walk") if key in settings}
    out, lse = forward(*p[:5], variant=variant, **settings)
    dlatent = torch.ones(p.latent.shape, device="cuda")
    dq, mass = backward(
        *p[:5], out, lse, p.grad, dlatent, variant=variant, scatter=scatter, probabilities=True,
        **only_backward, **settings,
    )  # fmt: skip
    assert mass is not None
    return [out, lse, dq, dlatent - 1, mass]


def twin(p: Inputs, **more: Any) -> list[torch.Tensor]:
    settings = SETTINGS | more
    return [
        *naive.forward_reference(*p[:5], **settings),
        *naive.backward_reference(*p, **settings),
    ]


def assert_as_good_as_bfloat16(found: list[torch.Tensor], p: Inputs, **more: Any) -> None:
    exact, low = twin(p.cast(torch.float32), **more), twin(p, upcast=False, **more)
    for name, tensor, right, rough in zip(NAMES, found, exact, low, strict=True):
        # Neither form has a logarithm of nothing; everywhere else it is finite.
        right, rough = right.nan_to_num(neginf=0), rough.float().nan_to_num(neginf=0)
        tensor = tensor.float().masked_fill(tensor == float("-inf"), 0)
        assert tensor.isfinite().all(), name
        error = (tensor - right).abs().max().item()
        allowed = 2 * (rough - right).abs().max().item() + 1e-4
        assert error <= allowed, f"{name}: off by {error:.3e}, {allowed:.3e} is allowed"


@forms
@pytest.mark.parametrize("lengths", [RAGGED, (5,), (1,), (4,), (2051,), (2500,)], ids=str)
def test_kernels_equal_the_twin(variant: str, scatter: str, lengths: tuple[int, ...]) -> None:
    p = draw_inputs(lengths, device="cuda", seed=sum(lengths))
    assert_as_good_as_bfloat16(kernels(p, variant, scatter), p)


@forms
def test_sixteen_seeds_with_queries_that_lost_their_pools(variant: str, scatter: str) -> None:
    for seed in range(16):
        p = draw_inputs((*SHORT, 400), count=48, device="cuda", seed=seed, drop=0.2)
        assert_as_good_as_bfloat16(kernels(p, variant, scatter), p)


@pytest.mark.parametrize(
    ("scatter", "walk"),
    [*(("lines", walk) for walk in WALKS), ("quads", BOTH), ("pairs", BOTH)],
    ids=str,
)
def test_walks_equal_the_twin(scatter: str, walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several groups of queries in the ranges.
    monkeypatch.setattr("kernels.sparse_mla.tilelang_backward.DQ_BYTES", 64 * 2**20)
    for lengths in (RAGGED, (1,), (5,), (2500,)):
        p = draw_inputs(lengths, device="cuda", seed=sum(lengths))
        assert_as_good_as_bfloat16(kernels(p, "split", scatter, walk=walk), p)


@walks
def test_walks_with_queries_that_lost_their_pools(walk: Walk) -> None:
    for seed in range(8):
        p = draw_inputs((*SHORT, 400), count=48, device="cuda", seed=seed, drop=0.2)
        assert_as_good_as_bfloat16(kernels(p, "split", "lines", walk=walk), p)


@walks
def test_walks_have_the_probabilities_of_the_plain_one_bit_for_bit(walk: Walk) -> None:
    p = draw_inputs(RAGGED, count=64, device="cuda")
    plain = kernels(p, "split", "lines", walk=Walk())
    assert torch.equal(kernels(p, "split", "lines", walk=walk)[4], plain[4])


@pytest.mark.parametrize(
    ("heads", "width", "size"), [(64, 512, 1), (128, 512, 4), (64, 256, 2), (64, 512, 16)]
)
def test_walks_of_other_shapes(heads: int, width: int, size: int) -> None:
    p = draw_inputs(RAGGED, heads=heads, width=width, size=size, count=100, device="cuda")
    assert_as_good_as_bfloat16(kernels(p, "split", None, size=size, walk=BOTH), p, size=size)


@pytest.mark.parametrize(
    ("heads", "width", "tail", "size"),
    [(64, 512, 64, 4), (64, 512, 64, 1), (128, 512, 0, 4), (64, 256, 0, 2), (64, 512, 0, 16)],
)
def test_other_shapes(heads: int, width: int, tail: int, size: int) -> None:
    p = draw_inputs(
        RAGGED, heads=heads, width=width, tail=tail, size=size, count=100, device="cuda"
    )
    variant = "simple" if tail else "split"
    more = {"size": size, "tail": tail}
    assert_as_good_as_bfloat16(kernels(p, variant, None, **more), p, **more)


@forms
def test_rows_without_keys(variant: str, scatter: str) -> None:
    p = draw_inputs((64,), count=4, device="cuda")
    p.pools.fill_(-1)
    out, lse, dq, dlatent, mass = kernels(p, variant, scatter)
    without = torch.arange(3, 64, 4, device="cuda")
    assert (out[without] == 0).all() and (lse[without] == float("-inf")).all()
    assert (dq[without] == 0).all() and (mass == 0).all() and dlatent.isfinite().all()


@forms
def test_nothing_unused_is_read_or_written(variant: str, scatter: str) -> None:
    whole = draw_inputs((4096,), count=32, device="cuda")
    p = whole.rows(slice(4000, 4090))
    tokens, used = selected_tokens(p.pools, p.position, p.start, 4)
    kept = torch.zeros(len(p.latent), dtype=torch.bool, device="cuda")
    kept[tokens[used]] = True
    latent = torch.where(kept.unsqueeze(1), p.latent, torch.nan)
    out, lse = forward(*p._replace(latent=latent)[:5], variant=variant, **SETTINGS)
    clean, _ = forward(*p[:5], variant=variant, **SETTINGS)
    assert torch.equal(out, clean)
    dlatent = torch.where(kept.unsqueeze(1), 0.0, torch.full_like(latent, torch.nan).float())
    inputs = (p.q, latent, *p[2:5], out, lse, p.grad, dlatent)
    backward(*inputs, variant=variant, scatter=scatter, **SETTINGS)
    assert dlatent[kept].isfinite().all() and dlatent[~kept].isnan().all()


@forms
def test_part_of_the_queries_is_the_same_bit_for_bit(variant: str, scatter: str) -> None:
    p = draw_inputs(RAGGED, count=64, device="cuda")
    whole = kernels(p, variant, scatter)
    some = slice(700, 901)
    part = kernels(p.rows(some), variant, scatter)
    for index in (0, 1, 2, 4):
        assert torch.equal(whole[index][some], part[index]), NAMES[index]


@pytest.mark.parametrize("variant", ["split", "simple"])
def test_deterministic_mode_repeats_bit_for_bit(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.sparse_mla.tilelang_backward.STORE_BYTES", 200 * 2**20)
    p = draw_inputs((700, 33, 5), count=64, device="cuda")
    first = kernels(p, variant, None, deterministic=True)
    assert_as_good_as_bfloat16(first, p)
    for _ in range(2):
        again = kernels(p, variant, None, deterministic=True)
        for name, a, b in zip(NAMES, first, again, strict=True):
            assert torch.equal(a, b), name


def far_queries(tokens: int, queries: int, count: int) -> Inputs:
    """The last queries of one document of so many tokens."""
    random = torch.Generator(device="cuda").manual_seed(0)
    position = torch.arange(tokens - queries, tokens, device="cuda")

    def draw(*shape: int) -> torch.Tensor:
        out = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
        return out.normal_(generator=random)

    return Inputs(
        draw(queries, 64, 512),
        draw(tokens, 512),
        spread_pools(position, count, 4, random),
        position,
        torch.zeros_like(position),
        draw(queries, 64, 512),
    )


@pytest.mark.parametrize("walk", [Walk(), Walk(in_phase=True), Walk(range_tokens=2**17)], ids=str)
@pytest.mark.parametrize("tokens", [2**18 + 4099, 2**22 + 4099], ids=["2^18", "2^31 elements"])
def test_more_keys(tokens: int, walk: Walk) -> None:
    p = far_queries(tokens, 70, 512)
    assert_as_good_as_bfloat16(kernels(p, "split", "lines", walk=walk), p)


@pytest.mark.parametrize("walk", [Walk(in_phase=True), Walk(range_tokens=2**15)], ids=str)
def test_walks_of_many_more_queries_than_run_at_a_time(walk: Walk) -> None:
    p = far_queries(2**17, 3000, 512)
    plain = kernels(p, "split", "lines", walk=Walk())
    found = kernels(p, "split", "lines", walk=walk)
    assert torch.equal(found[4], plain[4])
    for index in (2, 3):
        gap = (found[index].float() - plain[index].float()).abs().max().item()
        assert gap <= 2**-7 * plain[index].float().abs().max().item(), NAMES[index]


def test_more_than_two_to_the_thirty_one_elements_of_queries() -> None:
    p = far_queries(70_000, 66_000, 4)
    found = kernels(p, "split", "lines")
    last = slice(65_900, None)
    rows = [found[i][last] for i in (0, 1, 2, 4)]
    part = p.rows(last)
    dlatent = kernels(part, "split", "lines")[3]
    assert_as_good_as_bfloat16([*rows[:3], dlatent, rows[3]], part)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_listed_form_passes_what_tuning_asks(direction: str) -> None:
    bench = OnGpu(gate=(1, 5, 64, 301, 2100), timed=(4096,))
    plan = Plan(direction, *tuned.choice(direction, GLM))
    assert bench.wrong(plan, GLM, direction == "backward") is None
    assert 0 < bench.milliseconds(plan, GLM) < 100
