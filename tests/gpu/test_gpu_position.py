"""ALiBi in FlexAttention on a GPU (`make test ARGS="-m gpu"`)."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torchtitan.tools.utils
from torch.nn.attention.flex_attention import create_block_mask

from components.titan.attention import QuickFlexAttention, SdpaAttention
from kernels.position.alibi import DistanceBias, alibi_slopes
from tests.training import losses, small_overrides, train, write_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

HEADS, LENGTH, WIDTH = 6, 700, 48


def document_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & ((q < 300) == (kv < 300))


def computed(attention: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values."""
    generator = torch.Generator("cuda").manual_seed(5)
    shapes = [(1, LENGTH, heads, WIDTH) for heads in (HEADS, 3, 3, HEADS)]
    *inputs, upstream = (
        torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes
    )
    q, k, v = (t.requires_grad_() for t in inputs)
    mask = create_block_mask(document_mask, 1, None, LENGTH, LENGTH, device="cuda")
    slopes = torch.tensor(alibi_slopes(HEADS), device="cuda")
    out = attention(q, k, v, attention_masks=mask, score_mod=DistanceBias(slopes), enable_gqa=True)
    return [out, *torch.autograd.grad(out, (q, k, v), upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [QuickFlexAttention, SdpaAttention])
def test_attention_with_the_bias_equals_float64(attention: Any, dtype: torch.dtype) -> None:
    def dense(q: Any, k: Any, v: Any, **others: Any) -> torch.Tensor:
        q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        at = torch.arange(LENGTH, device="cuda")
        slopes = torch.tensor(alibi_slopes(HEADS), device="cuda", dtype=torch.float64)
        bias = -slopes[:, None, None] * (at[:, None] - at)
        seen = document_mask(0, 0, at[:, None], at)
        scores = (q @ k.mT / math.sqrt(WIDTH) + bias).masked_fill(~seen, -math.inf)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).to(dtype)

    # Their FP32 products may round to TF32.
    tolerance = 2e-3 if dtype == torch.float32 else 1.5e-2
    for ours, exact in zip(
        computed(attention(attention.Config()), dtype), computed(dense, dtype), strict=True
    ):
        assert float((ours.double() - exact.double()).norm() / exact.double().norm()) < tolerance


def test_layers_and_steps_share_one_compiled_attention() -> None:
    attention = QuickFlexAttention(QuickFlexAttention.Config())
    computed(attention, torch.float32)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    computed(attention, torch.float32)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize(
    "toggles",
    [[], ["components.layer_recompute.enabled=true"], ["compile.enable=true"]],
    ids=["plain", "recompute", "compiled"],
)
def test_flex_and_sdpa_learn_the_same_with_alibi(toggles: list[str], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    settings = [*small_overrides(corpus), "model.position.kind=alibi"]
    train(tmp_path / "flex", [*settings, "model.attention=flex", *toggles])
    train(tmp_path / "sdpa", [*settings, "model.attention=sdpa"])
    assert losses(tmp_path / "flex") == pytest.approx(losses(tmp_path / "sdpa"), rel=2e-3)


def test_stretched_rotation_learns_on_a_gpu(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    scaling = [
        "model.position.scaling=yarn",
        "model.position.factor=4",
        "model.position.original_seq_len=32",
    ]
    train(tmp_path / "yarn", [*small_overrides(corpus), *scaling])
    found = losses(tmp_path / "yarn")
    assert all(map(math.isfinite, found)) and found[-1] < found[0]
