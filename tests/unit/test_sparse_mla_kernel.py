"""The sparse attention kernels on the CPU: their twin, their plan, their checks, their compiler."""

import shutil
from typing import Any

import pytest
import torch

from kernels.dsa.keys import selected_tokens
from kernels.dsa.naive import token_mask
from kernels.sparse_mla import naive, tuned
from kernels.sparse_mla.inputs import Inputs, draw_inputs
from kernels.sparse_mla.plan import row_plan, slot_tokens
from kernels.sparse_mla.shape import TILE, Shape, check
from kernels.sparse_mla.tilelang_backward import backward
from kernels.sparse_mla.tilelang_forward import forward

LENGTHS = (1, 2, 3, 4, 5, 17, 40)
SCALE = 0.25


def dense(p: Inputs, size: int, tail: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, logarithms of sums and probabilities (Q, H, T) from a mask over all tokens."""
    mask = token_mask(p.pools, p.position, p.start, size)
    logits = torch.einsum("qhd,kd->qhk", p.q, p.latent) * SCALE
    logits = logits.masked_fill(~mask.unsqueeze(1), float("-inf"))
    probabilities = logits.softmax(-1).nan_to_num(0.0)
    values = p.latent[:, : p.latent.shape[1] - tail]
    return torch.einsum("qhk,kd->qhd", probabilities, values), logits.logsumexp(-1), probabilities


@pytest.mark.parametrize(("size", "tail"), [(4, 0), (4, 3), (1, 0), (3, 2)])
def test_twin_equals_the_dense_definition_in_float64(size: int, tail: int) -> None:
    p = draw_inputs(
        LENGTHS, heads=2, width=5, tail=tail, count=4, size=size, dtype=torch.float64, drop=0.2
    )
    q, latent = p.q.requires_grad_(), p.latent.requires_grad_()
    wanted, wanted_lse, probabilities = dense(p, size, tail)
    out, lse = naive.forward_reference(*p[:5], size=size, scale=SCALE, tail=tail)
    assert torch.allclose(out, wanted, atol=1e-12)
    assert torch.allclose(lse, wanted_lse, atol=1e-12)
    dq, dlatent = torch.autograd.grad(wanted, (q, latent), p.grad)
    found = naive.backward_reference(*p, size=size, scale=SCALE, tail=tail)
    assert torch.allclose(found[0], dq.nan_to_num(0.0), atol=1e-12)
    assert torch.allclose(found[1], dlatent.nan_to_num(0.0), atol=1e-12)
    for row in range(len(p.pools)):
        for slot, pool in enumerate(p.pools[row].tolist()):
            begin = int(p.start[row]) + pool * size
            mass = probabilities[row, :, begin : begin + size].detach().sum() if pool >= 0 else 0.0
            assert found[2][row, slot].item() == pytest.approx(float(mass), abs=1e-12)


def test_a_query_without_keys_has_zeros_and_no_gradient() -> None:
    p = draw_inputs((8,), heads=2, width=4, count=2, dtype=torch.float64)
    p.pools.fill_(-1)
    out, lse = naive.forward_reference(*p[:5], size=4, scale=SCALE)
    dq, dlatent, mass = naive.backward_reference(*p, size=4, scale=SCALE)
    without = [3, 7]
    assert (out[without] == 0).all() and (lse[without] == float("-inf")).all()
    assert (dq[without] == 0).all() and dlatent.isfinite().all() and (mass == 0).all()
    assert out[[0, 6]].abs().sum() > 0


def test_twin_in_chunks_equals_the_twin_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    p = draw_inputs((40,), heads=2, width=4, count=3, dtype=torch.float64)
    whole = naive.backward_reference(*p, size=4, scale=SCALE)
    monkeypatch.setattr(naive, "_CHUNK_BYTES", 1)
    parts = naive.backward_reference(*p, size=4, scale=SCALE)
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(whole, parts, strict=True))


def test_twin_reads_nothing_of_what_is_not_selected() -> None:
    p = draw_inputs((64,), heads=2, width=4, count=2, dtype=torch.float64)
    clean = naive.forward_reference(*p[:5], size=4, scale=SCALE)[0]
    tokens, used = selected_tokens(p.pools[60:], p.position[60:], p.start[60:], 4)
    poisoned = torch.full_like(p.latent, float("nan"))
    kept = tokens[used].unique()
    poisoned[kept] = p.latent[kept]
    some = p._replace(latent=poisoned).rows(slice(60, None))
    out, _ = naive.forward_reference(*some[:5], size=4, scale=SCALE)
    assert torch.equal(out, clean[60:])


@pytest.mark.parametrize("size", [1, 4])
def test_plan_walks_through_the_selected_tokens(size: int) -> None:
    p = draw_inputs(LENGTHS, heads=1, width=1, count=5, size=size, drop=0.3)
    tokens, used = selected_tokens(p.pools, p.position, p.start, size)
    slots = slot_tokens(row_plan(p.pools, p.position, p.start, size), p.pools, size, TILE)
    for row in range(len(tokens)):
        kept = slots[row][slots[row] >= 0]
        assert kept.tolist() == tokens[row][used[row]].tolist()
        assert (slots[row, len(kept) :] == -1).all()


def test_plan_of_positions_beyond_two_to_the_eighteen() -> None:
    position, start = torch.tensor([2**18 + 1]), torch.tensor([5_000_000])
    pools = torch.tensor([[0, 2**16 - 1]], dtype=torch.int32)
    plan = row_plan(pools, position, start, 4)
    assert plan.tolist() == [[2, 10, 5_000_000, 5_000_000 + 2**18]]
    assert slot_tokens(plan, pools, 4, TILE)[0, 7].item() == 5_000_000 + 2**18 - 1


def bad(**changes: Any) -> dict[str, Any]:
    p = draw_inputs((4,), heads=64, width=256, count=1)
    given: dict[str, Any] = dict(zip(Inputs._fields[:5], p[:5], strict=True))
    return given | {"size": 4, "scale": 1.0, "tail": 0} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(4, 48, 256, dtype=torch.bfloat16)}, "heads=48, legal are multiples"),
        ({"q": torch.zeros(4, 64, 256)}, "q is torch.float32, legal is torch.bfloat16"),
        ({"q": torch.zeros(4, 64)}, r"wants q \(Q, heads, d\)"),
        ({"tail": 32}, "tail=32, legal are"),
        ({"tail": 64}, "width=192 .* legal are"),
        ({"size": 3}, "size=3 tokens per pool, legal are"),
        ({"scale": -1.0}, "scale=-1.0, legal is a number above 0"),
        ({"position": torch.zeros(3)}, "position has"),
        ({"pools": torch.zeros(4, 1)}, "pools is torch.float32, legal is torch.int32"),
        ({"latent": torch.zeros(4, 512, dtype=torch.bfloat16)}, "latent has"),
    ],
)
def test_what_the_kernels_do_not_take_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(**bad(**changes))


def test_a_missing_gpu_is_named() -> None:
    p = draw_inputs((4,), heads=64, width=256, count=1)
    with pytest.raises(RuntimeError, match="tensors are on cpu, .* the torch backend runs"):
        forward(*p[:5], size=4, scale=1.0)
    out, lse = naive.forward_reference(*p[:5], size=4, scale=1.0)
    dlatent = torch.zeros(p.latent.shape)
    with pytest.raises(RuntimeError, match="tensors are on cpu"):
        backward(*p[:5], out, lse, p.grad, dlatent, size=4, scale=1.0)
    with pytest.raises(ValueError, match="dlatent is torch.bfloat16"):
        backward(*p[:5], out, lse, p.grad, dlatent.bfloat16(), size=4, scale=1.0)
    with pytest.raises(ValueError, match="scatter='quads' of the simple variant"):
        backward(
            *p[:5], out, lse, p.grad, dlatent, size=4, scale=1.0, variant="simple", scatter="quads"
        )


def shape(tail: int = 0) -> Shape:
    return Shape(heads=64, width=512, tail=tail, size=4, scale=1 / 16)


def test_tuned_choice_fits_the_shape() -> None:
    assert tuned.choice("forward", shape())[0] == "split"
    assert tuned.choice("backward", shape(64))[0] == "simple"
    with pytest.raises(ValueError, match="tail=64, the split forward takes 0 only"):
        tuned.choice("forward", shape(64), "split")
    with pytest.raises(ValueError, match="variant='fast' of the forward, legal are"):
        tuned.choice("forward", shape(), "fast")


KERNELS = [
    *[(f"forward_{name}", tail, {}) for name, tail in (("split", 0), ("simple", 64))],
    ("backward_split", 0, {"emit": True, "scatter": "lines", "running": 132}),
    ("backward_split", 0, {"emit": False, "scatter": "store"}),
    ("backward_split", 0, {"emit": True, "scatter": "quads", "running": 132, "partial": True}),
    ("backward_simple", 64, {"emit": True, "scatter": "pairs"}),
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("kernel", "tail", "more"), KERNELS, ids=lambda x: str(x))
def test_kernels_compile_for_hopper(kernel: str, tail: int, more: dict[str, Any]) -> None:
    pytest.importorskip("tilelang")
    from kernels.sparse_mla.compiler import compiled

    direction, variant = kernel.split("_")
    options = tuned.choice(direction, shape(tail), variant)[1] | more
    source = compiled(kernel, shape(tail), **options).get_kernel_source()
    assert "wgmma_ss" in source and "int64_t" in source
    assert ("cp_async_gs_conditional<16>" in source) == (variant == "split")
    assert ("tick((&(clock" in source) == ("running" in more)
