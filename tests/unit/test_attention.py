"""SDPA in query chunks against the dense fp32 twin: outputs and every gradient."""

import inspect
import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.models.common.attention import FlexAttention

from components.titan.attention import QuickFlexAttention, SdpaAttention, resolve_attention
from kernels.attention.naive import masked_attention
from kernels.attention.sdpa import chunked_sdpa, mask_of_queries


def packed_mask(starts: list[int], length: int):  # type: ignore[no-untyped-def]
    """Causal within documents that begin at ``starts``."""
    document = torch.zeros(length, dtype=torch.int64)
    for start in starts[1:]:
        document[start:] += 1

    def mask_mod(b, h, q, kv):  # type: ignore[no-untyped-def]
        return (q >= kv) & (document[q] == document[kv])

    return mask_mod


def inputs(length: int, heads: int = 4, kv_heads: int = 2, width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, heads, length, width), (2, kv_heads, length, width), (2, kv_heads, length, width)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("length", [1, 2, 63, 130])
@pytest.mark.parametrize("chunk", [1, 32, 1024])
def test_outputs_and_gradients_equal_the_dense_twin(length: int, chunk: int) -> None:
    mask_mod = packed_mask([0, length // 3, length // 2], length)
    upstream = torch.randn(2, 4, length, 16, generator=torch.Generator().manual_seed(7))
    results = []
    for name in ("chunked", "dense"):
        q, k, v = inputs(length)
        if name == "chunked":
            out = chunked_sdpa(q, k, v, mask_mod, query_chunk=chunk)
        else:
            mask = mask_of_queries(mask_mod, 2, 0, length, length, q.device)
            out, _ = masked_attention(q, k, v, mask)
        out.backward(upstream)
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for chunked, dense in zip(*results, strict=True):
        torch.testing.assert_close(chunked, dense, rtol=1e-4, atol=1e-5)


def test_a_document_does_not_see_the_one_before() -> None:
    mask_mod = packed_mask([0, 40], 100)
    q, k, v = inputs(100)
    before = chunked_sdpa(q, k, v, mask_mod, query_chunk=32).detach()
    with torch.no_grad():
        k[:, :, :40] += 3
        v[:, :, :40] *= -2
    after = chunked_sdpa(q, k, v, mask_mod, query_chunk=32).detach()
    assert torch.equal(before[:, :, 40:], after[:, :, 40:])
    assert not torch.equal(before[:, :, :40], after[:, :, :40])


def test_dense_twin_against_arithmetic_by_hand() -> None:
    q = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]])
    k = torch.tensor([[[[1.0, 1.0], [0.0, 1.0]]]])
    v = torch.tensor([[[[1.0], [3.0]]]])
    causal = torch.tril(torch.ones(2, 2, dtype=torch.bool))
    out, lse = masked_attention(q, k, v, causal, scale=1.0)
    # Row 0 sees key 0 alone; row 1 scores both keys 2.
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([1.0, 2.0 + math.log(2)]))


def test_a_row_without_keys_is_zero_with_finite_gradients() -> None:
    q, k, v = inputs(3)
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    out, lse = masked_attention(q, k, v, nothing)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


def test_sinks_get_the_log_sum_exp() -> None:
    length, seen = 64, {}
    mask_mod = packed_mask([0], length)
    mask = create_block_mask(mask_mod, 2, None, length, length, device="cpu")
    q, k, v = (t.transpose(1, 2) for t in inputs(length))

    def transform(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        seen["lse"] = lse
        return out * torch.sigmoid(lse).unsqueeze(-1)

    attention = SdpaAttention(SdpaAttention.Config())
    out = attention(q, k, v, attention_masks=mask, out_transform=transform)
    plain = attention(q, k, v, attention_masks=mask)
    assert seen["lse"].shape == (2, length, 4)
    torch.testing.assert_close(
        out, plain * torch.sigmoid(seen["lse"]).unsqueeze(-1), rtol=1e-4, atol=1e-5
    )


def test_backends_without_a_cpu_backward_are_refused() -> None:
    assert resolve_attention("auto", "cpu") == "sdpa"
    assert resolve_attention("auto", "cuda") == "flex"
    with pytest.raises(ValueError, match="model.attention: 'flex' has no backward pass on a CPU"):
        resolve_attention("flex", "cpu")


@pytest.mark.parametrize("replacement", [SdpaAttention, QuickFlexAttention])
def test_arguments_that_would_be_lost_are_refused(replacement: type) -> None:
    length = 64
    mask = create_block_mask(packed_mask([0], length), 2, None, length, length, device="cpu")
    q, k, v = (t.transpose(1, 2) for t in inputs(length))
    attention = replacement(replacement.Config())  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="model.attention: the model passes is_causal to its"):
        attention(q, k, v, attention_masks=mask, enable_gqa=True, is_causal=False)


def test_every_argument_of_torchtitans_own_attention_is_known() -> None:
    stock = inspect.signature(FlexAttention.forward).parameters
    for replacement in (SdpaAttention, QuickFlexAttention):
        ours = inspect.signature(replacement.forward).parameters
        named = [name for name, p in stock.items() if p.kind is not p.VAR_KEYWORD]
        assert set(named) <= ours.keys()
        assert all(ours[name].kind is stock[name].kind for name in named)
