"""Attention layers of real models, whole and with their sequence split over ranks, for tests."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.protocols.module import Module

from components.context_parallel.collectives import Link, collect
from components.context_parallel.share import Share
from components.context_parallel.softmax.attend import Exchange
from components.models.library import TitanModel
from components.models.position import Position
from components.titan.cp_attention import share_attention
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
