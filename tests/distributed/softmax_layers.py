"""Layers whose sequence is split over ranks against whole ones: checks of every rank."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.protocols.module import Module

from components.context_parallel.collectives import Link, collect
from components.context_parallel.layout import cut_batch
from components.context_parallel.share import Share
from components.context_parallel.softmax.attend import Exchange, attend
from components.context_parallel.softmax.kernel import PlainKernel
from components.models.glm_flash.documents import Documents
from components.models.library import TitanModel
from components.models.position import Position
from components.recompute.layer import RecomputedLayer
from components.titan.cp_attention import share_attention
from tests.distributed.softmax_support import (
    BATCHES,
    VALUE,
    WIDTH,
    Case,
    differences,
    exchanges,
    share_of,
)
from tests.unit.chunked_support import build
from tests.unit.models_support import tiny_moe

DIMS = {"moe": 64, "moe, alibi": 64, "gpt_oss, sliding": 256, "gpt_oss, full": 256}


def layer(name: str) -> Any:
    """Config of an attention; a sliding window is shortened to 20 tokens."""
    if name.startswith("moe"):
        position = Position(kind="alibi") if "alibi" in name else Position()
        return tiny_moe(position=position, qk_norm=True).build_spec().model.layers[0].attention
    layers = TitanModel(family="gpt_oss", flavor="debugmodel").build_spec().model.layers
    config = layers[0 if "sliding" in name else 1].attention
    assert (config.sliding_window_size is not None) == ("sliding" in name)
    window = 20 if "sliding" in name else None
    return replace(config, sliding_window_size=window, rope=replace(config.rope, max_seq_len=256))


class DenseAttention(nn.Module):
    """Inner attention of one process by its definition, in the inputs' dtype."""

    def __init__(self, lengths: tuple[int, ...], window: int | None) -> None:
        super().__init__()
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        place = torch.arange(len(document))
        self.distance = place[:, None] - place
        self.seen = (self.distance >= 0) & (document[:, None] == document)
        if window is not None:
            self.seen &= self.distance < window

    def forward(self, q, k, v, *, scale, score_mod=None, out_transform=None, **others):  # type: ignore[no-untyped-def]
        groups = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) * scale
        if score_mod is not None:
            scores = scores - score_mod.slopes[:, None, None] * self.distance
        scores = scores.masked_fill(~self.seen, -math.inf)
        out = torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v)
        return out if out_transform is None else out_transform(out, scores.logsumexp(-1).mT)


def one_process(name: str, lengths: tuple[int, ...], x: torch.Tensor, pull: torch.Tensor) -> Any:
    config = layer(name)
    module = build(config)
    module.inner_attention = DenseAttention(lengths, getattr(config, "sliding_window_size", None))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return differentiate(module, x, pull, None, positions)


def several(
    name: str, exchange: Exchange, share: Share, x: torch.Tensor, pull: torch.Tensor
) -> Any:
    """Rows in the order of the batch; gradients of parameters summed over ranks."""
    module = build(share_attention(layer(name), exchange))
    assert isinstance(module.inner_attention, Module)
    found = differentiate(module, share.take(x), share.take(pull), share, share.position)
    for tensor, value in found.items():
        if tensor in ("output", "input"):
            order, link = share.layout.order, Link(share.link.group)
            found[tensor] = collect(value, order, link, "test")
        else:
            dist.all_reduce(value, group=share.link.group)
    return found


def differentiate(
    module: nn.Module, x: torch.Tensor, pull: torch.Tensor, masks: Share | None,
    positions: torch.Tensor,
) -> dict[str, torch.Tensor]:  # fmt: skip
    x = x.clone().requires_grad_()
    out = module(x.unsqueeze(0), masks, positions.unsqueeze(0)).squeeze(0)
    out.backward(pull)
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"output": out.detach(), "input": x.grad, **grads}


WITH_GPT_OSS = {"gpt_oss, sliding": ("ring",), "gpt_oss, full": ("ulysses", "ring")}


def layers_of_models() -> None:
    """Attentions as models have them, with rotary positions, norms, sinks, windows or slopes."""
    link, generator = Link(dist.group.WORLD), torch.Generator().manual_seed(0)
    lengths = BATCHES[link.size]["shorter than a share"]
    for name, dim in DIMS.items():
        x, pull = torch.randn(2, sum(lengths), dim, generator=generator, dtype=torch.float64)
        wanted = one_process(name, lengths, x, pull)
        for method, exchange in exchanges(link.size).items():
            # Layers of gpt-oss are large, and one with a window has but one method.
            if "gpt_oss" in name and method not in WITH_GPT_OSS[name]:
                continue
            share = share_of(lengths, "zigzag", link)
            found = several(name, exchange, share, x, pull)
            assert ("sinks" in found) == ("gpt_oss" in name)
            for tensor, error in differences(found, wanted):
                assert error <= 1e-11, (name, method, tensor, error)
            names = {sent for sent, _ in link.traffic.sent}
            link.traffic.reset()
            halo = {"window.keys_values", "window.gradients"}
            assert (names == halo) == ("sliding" in name or method == "window")


class Layer(nn.Module):
    """An attention whose queries, keys and values come from one weight each."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.exchange, self.case = exchange, Case(key_heads=1)
        for name, rows in (("q", 4 * WIDTH), ("k", WIDTH), ("v", VALUE)):
            weight = torch.randn(rows, 16, generator=generator, dtype=torch.float64) / 4
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: torch.Tensor, share: Any) -> torch.Tensor:
        q, k, v = (
            (x @ weight.t()).unflatten(1, (heads, -1))
            for weight, heads in ((self.q, 4), (self.k, 1), (self.v, 1))
        )
        out, _ = attend(q, k, v, share, self.exchange, self.case.scores(), PlainKernel())
        return x + out.flatten(1)


def fsdp_and_recompute() -> None:
    """FSDP sums the ranks' shares of gradients; a second forward in backward keeps the order."""
    link = Link(dist.group.WORLD)
    lengths = BATCHES[link.size]["documents over every cut"]
    whole = Share(cut_batch(lengths, 1), Documents.from_lengths(lengths), alone_in_a_group())
    share, generator = share_of(lengths, "zigzag", link), torch.Generator().manual_seed(0)
    x, pull = torch.randn(2, sum(lengths), 16, generator=generator, dtype=torch.float64)
    methods = exchanges(link.size).values()
    plain = nn.ModuleList(Layer(Exchange("all_gather")) for _ in methods)
    layers = nn.ModuleList(RecomputedLayer(Layer(exchange)) for exchange in methods)
    mesh = init_device_mesh("cpu", (link.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
        # As torchtitan does: the loss is divided by all ranks' tokens already.
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
    outputs = []
    for some, place, upstream in ((plain, whole, pull), (layers, share, share.take(pull))):
        y = place.take(x)
        for layer in some:
            y = layer(y, place)
        y.backward(upstream)
        outputs.append(y.detach())
    assert (outputs[1] - share.take(outputs[0])).abs().max() < 1e-10
    for one, sharded in zip(plain.parameters(), layers.parameters(), strict=True):
        error = (sharded.grad.full_tensor() - one.grad).abs().max() / one.grad.abs().max()
        assert error < 1e-10, error
    # Keys went round once in forward, once more for it, and once in backward.
    ring = {d: n for (name, d), n in link.traffic.sent.items() if name == "softmax.ring"}
    assert ring["forward"] == 2 * ring["backward"]


def alone_in_a_group() -> Link:
    """Of groups of one rank, this rank's."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return Link(groups[dist.get_rank()])
