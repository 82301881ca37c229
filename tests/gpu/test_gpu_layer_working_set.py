"""On a GPU: what a whole layer of GLM-5.3-Flash needs while it runs backward, at true widths.

In bfloat16 with fla's kernels, which it tunes for minutes before the first results.
"""

from typing import Any

import pytest
import torch
import torch.nn as nn
import torchtitan.tools.utils

from components.expert_dispatch.experts import chunked_experts
from components.models.glm_flash.block import GlmFlashBlock, rebuilding
from components.models.glm_flash.chunked.overrides import (
    chunked_dsa,
    chunked_feed_forward,
    chunked_kda,
    chunked_shared_expert,
)
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.fused_connections import triton_hyper_connections
from components.models.glm_flash.hyper_connections import HyperConnection
from components.models.glm_flash.kda import KDA
from components.recompute.layer import RecomputedLayer
from tests.gpu.test_gpu_glm_flash import block_config, cast, with_fla
from tests.swaps import swap_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        torchtitan.tools.utils.device_type != "cuda",
        reason='needs a CUDA device and `make test ARGS="-m gpu"`',
    ),
]

TOKENS, CHUNK = 131072, 8192

WORKING_SET = 16 * 2**30
"""Bytes that a layer may need at 131,072 tokens, beside its input and gradients of parameters."""

SLOWER = 1.03
"""Time of a layer that merges its streams again over that of one that keeps them."""


def in_chunks(config: GlmFlashBlock.Config, chunk: int, more: bool) -> GlmFlashBlock.Config:
    """Parts in chunks, streams in kernels; ``more``: shared experts as well, and streams merged
    again."""
    swap_parts(config, HyperConnection.Config, triton_hyper_connections)
    mixer = chunked_kda if isinstance(config.attention, KDA.Config) else chunked_dsa
    config.attention = mixer(config.attention, chunk_tokens=chunk)
    if config.moe is None:
        config.feed_forward = chunked_feed_forward(config.feed_forward, chunk_tokens=chunk)
    else:
        given: dict[str, Any] = {"max_chunks": 64, "membership": "strided"}
        routed = config.moe.routed_experts
        config.moe.routed_experts = chunked_experts(routed, chunk_tokens=chunk, **given)
        if more:
            shared = config.moe.shared_experts
            config.moe.shared_experts = chunked_shared_expert(shared, chunk_tokens=chunk)
    return rebuilding(config) if more else config


class Pull(torch.autograd.Function):
    """Ends a graph; the gradient it sends back is nobody's but the graph's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.like = x.shape, x.dtype, x.device
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        shape, dtype, device = ctx.like
        return torch.full(shape, 1e-3, dtype=dtype, device=device)


def built(config: GlmFlashBlock.Config, device: str) -> nn.Module:
    with torch.device(device):
        block = config.build()
        block.init_states()
    cast(block, torch.bfloat16)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_("indexer" not in name)
    return block


def measure(block: nn.Module, streams: torch.Tensor, documents: Documents) -> tuple[float, int]:
    """Milliseconds of forward and backward, the best of three runs after one; and bytes at the peak
    of backward above what was there before."""
    layer, times, peak = RecomputedLayer(block), [], 0
    for _ in range(4):
        layer.zero_grad(set_to_none=True)
        streams.grad = None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        total = Pull.apply(layer(streams, documents))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        total.backward()
        end.record()
        end.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        times.append(begin.elapsed_time(end))
    return min(times[1:]), peak


def given(tokens: int, like: Any, device: str) -> tuple[torch.Tensor, Documents]:
    shape = 1, tokens, like.streams, like.dim
    streams = torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()
    return streams, Documents.from_lengths((tokens,), device)


@pytest.mark.parametrize("index", [0, 1, 3], ids=["kda+dense", "kda+moe", "dsa+moe"])
def test_a_layer_needs_16_gib_at_most_at_131072_tokens(index: int) -> None:
    config = in_chunks(with_fla(block_config(index)), CHUNK, more=True)
    block = built(config, "cuda")
    for name, parameter in block.named_parameters():
        # Sums of their gradients are counted elsewhere.
        parameter.requires_grad_("_hc." in name)
    time, peak = measure(block, *given(TOKENS, config.ffn_hc, "cuda"))
    print(f"layer {index}: {peak / 2**30:.2f} GiB, {time:.0f} ms without parameters' gradients")
    assert peak <= WORKING_SET


def test_streams_that_are_merged_again_cost_hardly_any_time() -> None:
    """In a layer with KDA and experts; with all gradients."""
    found = {}
    for more in (False, True):
        config = in_chunks(with_fla(block_config(1)), CHUNK, more)
        block = built(config, "cuda")
        found[more] = measure(block, *given(TOKENS, config.ffn_hc, "cuda"))
        time, peak = found[more]
        print(f"merged again: {more}: {time:.0f} ms, {peak / 2**30:.2f} GiB")
        del block
    # 4 GiB of streams, without the block of them that is merged again.
    assert found[True][1] < found[False][1] - 3.5 * 2**30
    assert found[True][0] <= SLOWER * found[False][0]
