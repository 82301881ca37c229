"""One part of a layer, forward, again, and backward: whole under recomputation, and in chunks.

Shapes: x [T, D]; T tokens in one document, at the gate in two. ``kda``, ``dsa``, ``dense`` or
``moe`` says which part; "wide" sizes have the published model's widths. ``moe`` is a router with 8
experts that every token visits, so that other precisions choose no others, and a shared one; all
trimmed, chunked or not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from components.expert_dispatch.experts import chunked_experts
from components.models.glm_flash.chunked.overrides import (
    chunked_dsa,
    chunked_feed_forward,
    chunked_kda,
    chunked_shared_expert,
)
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.fla_kernels import fla_kda, fla_short_conv
from components.models.glm_flash.flops import mean_keys
from components.models.glm_flash.indexer import IndexerInputs
from components.models.glm_flash.kda import KdaCore
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.short_conv import ShortConv
from components.models.glm_flash.trimmed import trim
from components.recompute.layer import RecomputedLayer
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Stage, Variant
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device
from tests.swaps import swap_parts

KINDS = ("kda", "dsa", "dense", "moe")
_LAYER = {"kda": 0, "dsa": 3, "dense": 0, "moe": 3}
_EXPERTS = 8


def _chunked_moe(config: Any, *, chunk_tokens: int) -> Any:
    settings: dict[str, Any] = {"max_chunks": 64, "membership": "strided"}
    routed = chunked_experts(config.routed_experts, chunk_tokens=chunk_tokens, **settings)
    shared = chunked_shared_expert(config.shared_experts, chunk_tokens=chunk_tokens)
    return replace(config, routed_experts=routed, shared_experts=shared)


_CHUNKED: dict[str, Callable[..., Any]] = {
    "kda": chunked_kda,
    "dsa": chunked_dsa,
    "dense": chunked_feed_forward,
    "moe": _chunked_moe,
}


@dataclass(kw_only=True, slots=True)
class Inputs:
    """``weights`` are the part's parameters in float32, ``pull`` is the output's gradient."""

    size: Size
    device: Device
    x: torch.Tensor
    pull: torch.Tensor
    weights: dict[str, torch.Tensor]
    documents: Documents
    pools: torch.Tensor | None


def _kind(size: Size) -> str:
    return next(kind for kind in KINDS if kind in size.shape)


def _config(size: Size) -> Any:
    """The whole part's config."""
    settings: dict[str, Any] = {"dim": size.shape["D"], "n_experts": _EXPERTS, "top_k": _EXPERTS}
    if not size.shape["wide"]:
        settings |= {
            "kda_heads": 2, "kda_head_dim": 16, "n_heads": 2, "q_lora_rank": 32,
            "kv_lora_rank": 16, "qk_head_dim": 16, "v_head_dim": 16, "index_n_heads": 2,
            "index_head_dim": 16, "index_topk": 32, "dense_hidden_dim": 96, "expert_hidden_dim": 24,
        }  # fmt: skip
    kind = _kind(size)
    layer = GlmFlashModel(**settings).build_spec().model.layers[_LAYER[kind]]
    if kind == "moe":
        trim(layer)
        return layer.moe
    return layer.feed_forward if kind == "dense" else layer.attention


def _build(inputs: Inputs, chunk_tokens: int | None, dtype: torch.dtype) -> nn.Module:
    """The part with the case's weights. In float64 everything is, and plain kernels run it."""
    config = _config(inputs.size)
    if chunk_tokens is not None:
        config = _CHUNKED[_kind(inputs.size)](config, chunk_tokens=chunk_tokens)
    if inputs.device == "cuda" and dtype != torch.float64:
        swap_parts(config, KdaCore.Config, fla_kda)
        swap_parts(config, ShortConv.Config, fla_short_conv)
    with torch.device(inputs.device):
        part = config.build()
    # Buffers, such as the router's bias, stay as they are built.
    part.load_state_dict(part.state_dict() | inputs.weights)
    for module in part.modules():
        full = isinstance(module, KdaCore | ShortConv) and dtype != torch.float64
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(torch.float32 if full else dtype)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_("indexer" not in name)
    if inputs.pools is not None:
        part.indexer.choose = partial(given_pools, inputs.pools)
    return part


def given_pools(
    pools: torch.Tensor, inputs: IndexerInputs, documents: Documents, begin: int = 0
) -> torch.Tensor:
    """In place of ``Indexer.choose``: other precisions would choose other pools."""
    return pools[begin : begin + len(inputs.queries)]


def _draw_weights(size: Size, device: Device, random: torch.Generator) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        named = list(_config(size).build().named_parameters())
    weights = {}
    for name, p in named:
        noise = torch.randn(p.shape, generator=random, device=device)
        scale = p.shape[-1] ** -0.5 if p.dim() >= 2 else 0.5
        shift = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        weights[name] = shift + scale * noise
    return weights


def make_inputs(size: Size, device: Device, seed: int, stage: Stage) -> Inputs:
    """Random inputs. At the gate, pools that were chosen once."""
    t, d = size.shape["T"], size.shape["D"]
    dtype = getattr(torch, size.dtype)
    random = torch.Generator(device=device).manual_seed(seed)
    x, pull = (torch.randn(t, d, generator=random, device=device).to(dtype) for _ in "xp")
    weights = _draw_weights(size, device, random)
    first = t // 3 | 1
    lengths = (first, t - first) if stage == "gate" else (t,)
    documents = Documents.from_lengths(lengths, device)
    inputs = Inputs(size=size, device=device, x=x, pull=pull, weights=weights,
                    documents=documents, pools=None)  # fmt: skip
    if stage == "gate" and _kind(size) == "dsa":
        part = _build(inputs, None, dtype)
        with torch.no_grad():
            inputs.pools = part.indexer(x, part.queries(x)[0], documents)
    return inputs


class _Layer(nn.Module):
    """The part as a layer takes it."""

    def __init__(self, part: nn.Module, documents: Documents | None) -> None:
        super().__init__()
        self.part, self.others = part, () if documents is None else (documents,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x.unsqueeze(0), *self.others).squeeze(0)


def layer_of(inputs: Inputs, chunk_tokens: int | None, dtype: torch.dtype) -> nn.Module:
    """The part in chunks, or whole (None) in a layer that is recomputed."""
    documents = None if _kind(inputs.size) in ("dense", "moe") else inputs.documents
    layer = _Layer(_build(inputs, chunk_tokens, dtype), documents)
    return layer if chunk_tokens is not None else RecomputedLayer(layer)


def step(layer: nn.Module, inputs: Inputs) -> Outputs:
    """The output and every gradient."""
    layer.zero_grad(set_to_none=True)
    dtype = next(layer.parameters()).dtype
    x = inputs.x.detach().to(dtype, copy=True).requires_grad_()
    out = layer(x)
    out.backward(inputs.pull.to(dtype))
    named = layer.named_parameters()
    grads = {f"d{n.split('part.')[-1]}": p.grad for n, p in named if p.grad is not None}
    assert x.grad is not None
    return {"out": out.detach(), "dx": x.grad, **grads}


def reference(inputs: Inputs) -> Outputs:
    """Float64 in chunks, which is tested to equal the whole and fits at every size."""
    chunk_tokens = max(64, inputs.size.shape["T"] // 16 // 64 * 64)
    return step(layer_of(inputs, chunk_tokens, torch.float64), inputs)


def tolerance(size: Size) -> dict[str, float]:
    """bfloat16 rounds between all projections, and inside fla's kernels."""
    limit = 1e-4 if size.dtype == "float32" else 5e-2
    with torch.device("meta"):
        names = [f"d{name}" for name, _ in _config(size).build().named_parameters()]
    return dict.fromkeys(["out", "dx", *names], limit)


def floor(size: Size, machine: Machine) -> Floor:
    """Four times the forward's products: twice forward, and backward; weights and rows moved."""
    t, d, config = size.shape["T"], size.shape["D"], _config(size)
    with torch.device("meta"):
        named = list(config.build().named_parameters())
    forward = 2.0 * sum(p.numel() for n, p in named if p.dim() == 2 and "indexer" not in n)
    if _kind(size) == "kda":
        width = config.core.head_dim
        forward += config.core.heads * (10 * 64 * width + 6 * width**2 + 64**2 * 2 / 3)
    elif _kind(size) == "dsa":
        heads = config.q_b_proj.out_features // config.head_dim
        forward += 4 * heads * config.kv_a_proj.out_features * mean_keys(config, t)
    elif _kind(size) == "moe":
        # Every token visits all of them.
        forward += 2.0 * sum(p.numel() for _, p in named if p.dim() == 3)
    width = getattr(torch, size.dtype).itemsize
    return roofline(
        machine,
        dtype=size.dtype,
        flops=4.0 * t * forward,
        flops_text=f"4 x {t} x {forward:.4g} FLOPs per token and forward",
        nbytes=float(width * t * d * 4),
        bytes_text=f"x, out and their gradients: 4 x {width} B x {t} x {d}",
    )


def _whole(inputs: Inputs, device: Device) -> Runnable:
    layer = layer_of(inputs, None, inputs.x.dtype)
    return Runnable(call=lambda: step(layer, inputs))


def _in_chunks(count: int, inputs: Inputs, device: Device) -> Runnable:
    chunk_tokens = max(64, inputs.size.shape["T"] // count // 64 * 64)
    layer = layer_of(inputs, chunk_tokens, inputs.x.dtype)
    return Runnable(call=lambda: step(layer, inputs))


def _sizes(kind: str, small: str) -> dict[str, Size]:
    long = {"T": 131072, "D": 4096, kind: 1, "wide": 1}
    return {
        small: Size(shape={"T": 300, "D": 32, kind: 1, "wide": 0}, dtype="float32"),
        f"{kind}_128k": Size(shape=long, dtype="bfloat16", devices=("cuda",)),
        f"{kind}_32k": Size(shape=long | {"T": 32768}, dtype="bfloat16", devices=("cuda",)),
    }


CASE = Case(
    name="sublayer_chunking",
    question="What does cutting a part of a layer into chunks save, and what does it cost?",
    sizes=_sizes("kda", "small")
    | _sizes("dsa", "small_dsa")
    | _sizes("dense", "small_dense")
    | _sizes("moe", "small_moe"),
    inputs=make_inputs,
    reference=reference,
    tolerance=tolerance,
    floor=floor,
    variants=(
        Variant(name="4 chunks", role="ours", build=partial(_in_chunks, 4)),
        Variant(name="8 chunks", role="ours", build=partial(_in_chunks, 8)),
        Variant(name="16 chunks", role="ours", build=partial(_in_chunks, 16)),
        Variant(name="whole, recomputed", role="peer", build=_whole),
    ),
)
