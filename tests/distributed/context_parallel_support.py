"""Mixers of GLM-5.3-Flash, whole and with their sequence split over ranks, for tests."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from components.context_parallel.collectives import Link, collect
from components.context_parallel.dsa import dsa_gathered
from components.context_parallel.kda_heads import kda_hidden, kda_projections
from components.context_parallel.kda_state import kda_state
from components.context_parallel.layout import cut_batch
from components.context_parallel.share import Share
from components.models.glm_flash.documents import Documents
from tests.unit.chunked_support import build
from tests.unit.models_support import tiny_glm

DIM, HEADS, HEAD, RANK, INDEX = 32, 4, 16, 8, 8
Method = Callable[[Any, torch.Tensor, Share], torch.Tensor]
METHODS: dict[str, Method] = {
    "kda hidden": kda_hidden,
    "kda projections": kda_projections,
    "kda state": kda_state,
    "dsa": dsa_gathered,
}
# Lengths by number of ranks. Zigzag cuts every 24 tokens, or every 16.
BATCHES = {
    2: {
        "documents over every cut": (30, 33, 33),
        "one document": (96,),
        "shorter than a share": (5, 61, 30),
        "ragged total": (1, 41, 2, 50, 7),
        "cut between documents": (24, 24, 24, 24),
        "no pool on one rank": (1,) * 50 + (46,),
        "no pool at all": (1, 2, 3) * 16,
    },
    4: {
        "documents over every cut": (45, 50, 33),
        "one document": (128,),
        "shorter than a share": (5, 90, 3, 1, 29),
        "ragged total": (1, 70, 2, 58, 5),
    },
}


def mixer(method: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model's own module, random weights, its indexer frozen."""
    model = tiny_glm(
        dim=DIM, kda_heads=HEADS, kda_head_dim=HEAD, n_heads=2, q_lora_rank=16, kv_lora_rank=RANK,
        qk_head_dim=8, v_head_dim=8, index_n_heads=2, index_head_dim=INDEX, index_topk=16,
    )  # fmt: skip
    first, *_, last = model.build_spec().model.layers
    if method == "dsa":
        return build(last.attention, dtype)
    module = build(first.attention, dtype)
    # Decays so slow that a state outlives several parts.
    module.core.dt_bias.data -= 4
    return module


def rows(count: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, DIM, generator=generator, dtype=torch.float64).to(dtype)


def share_of(lengths: tuple[int, ...], kind: str, link: Link) -> Share:
    layout = cut_batch(lengths, link.size, kind)
    return Share(layout, Documents.from_lengths(lengths), link)


def whole(
    module: nn.Module, lengths: tuple[int, ...], x: torch.Tensor, pull: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """One process: the output, and gradients of the input ("x") and of every parameter."""
    documents = Documents.from_lengths(lengths)
    return differentiate(module, lambda y: module(y.unsqueeze(0), documents).squeeze(0), x, pull)


def split(
    module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], share: Share,
    x: torch.Tensor, pull: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:  # fmt: skip
    """The same from all ranks: rows in the order of the batch, parameters' gradients summed."""
    out, grads = differentiate(module, run, share.take(x), share.take(pull))
    parameters = {n: g for n, g in grads.items() if g is not None and n != "x"}
    # In one message: that is quicker than one for each.
    flat = torch.cat([g.flatten() for g in parameters.values()])
    dist.all_reduce(flat, group=share.link.group)
    parts = flat.split([g.numel() for g in parameters.values()])
    sums = {n: f.view_as(g) for (n, g), f in zip(parameters.items(), parts, strict=True)}
    assert grads["x"] is not None
    both = torch.cat([out, grads["x"]], -1)
    out, grad_x = collect(both, share.layout.order, share.link, "test").split(DIM, -1)
    return out, {n: sums.get(n) for n in grads} | {"x": grad_x}


def differentiate(
    module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor, pull: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:  # fmt: skip
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = run(x)
    out.backward(pull)
    grads = {n: p.grad for n, p in module.named_parameters()}
    return out.detach(), {"x": x.grad, **grads}


def assert_close(name: str, found: Any, wanted: Any, share: float) -> None:
    """Within ``share`` of the largest element, or of 1 if that is larger."""
    if found is None or wanted is None:
        assert found is wanted, name
        return
    error = (found.double() - wanted.double()).abs().max().item()
    assert error <= share * max(wanted.abs().max().item(), 1), f"{name}: off by {error:.1e}"


class Residual(nn.Module):
    """One mixer on a share, as a layer."""

    def __init__(self, method: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.method, self.mixer = method, mixer(method, dtype)

    def forward(self, x: torch.Tensor, share: Share) -> torch.Tensor:
        return x + METHODS[self.method](self.mixer, x, share)
