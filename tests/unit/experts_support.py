"""Routed experts in two forms, whole and in chunks, with the same weights."""

from typing import Any

import torch
from torchtitan.models.common.moe import RoutedExperts

from components.expert_dispatch.experts import ChunkedRoutedExperts, chunked_experts
from tests.unit.models_support import tiny_glm, tiny_moe

DIM, EXPERTS, TOP_K = 32, 8, 3
FAMILIES = ("glm", "moe")
"""GLM-5.3-Flash's experts, of any dtype; torchtitan's own, which multiply in bfloat16."""

Gradients = dict[str, torch.Tensor | None]


def config_of(
    family: str, chunk_tokens: int | None = None, **settings: Any
) -> RoutedExperts.Config:
    """The routed experts of a small model; ``chunk_tokens`` None: whole."""
    build = tiny_glm if family == "glm" else tiny_moe
    model = build(dim=DIM, n_experts=EXPERTS, top_k=TOP_K, expert_hidden_dim=16)
    config = model.build_spec().model.layers[-1].moe.routed_experts
    if chunk_tokens is None:
        return config
    given = {"max_chunks": 64, "membership": "strided"} | settings
    return chunked_experts(config, chunk_tokens=chunk_tokens, **given)


def build(config: RoutedExperts.Config, dtype: torch.dtype = torch.float64) -> RoutedExperts:
    """With random weights of ``dtype``."""
    experts, draw = config.build(), torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.data = (values * parameter.shape[-1] ** -0.5).to(dtype)
    return experts


def in_chunks(
    family: str, chunk_tokens: int, dtype: torch.dtype = torch.float64, **settings: Any
) -> ChunkedRoutedExperts:
    experts = build(config_of(family, chunk_tokens, **settings), dtype)
    assert isinstance(experts, ChunkedRoutedExperts)
    return experts


def routing(
    tokens: int, seed: int = 0, experts: int = EXPERTS, duplicates: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (tokens, TOP_K) float32 and expert ids int64, all below ``experts``."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.rand(tokens, TOP_K, generator=draw)
    if duplicates:
        return weights, torch.randint(experts, (tokens, TOP_K), generator=draw)
    return weights, torch.rand(tokens, experts, generator=draw).topk(TOP_K).indices


def rows(tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 + seed)
    return torch.randn(tokens, DIM, generator=draw, dtype=torch.float64).to(dtype)


def run(
    experts: RoutedExperts,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """(T, DIM) -> (T, DIM), as one sequence."""
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    return experts(x[None], weights[None], ids[None], counts)[0]


def gradients(
    experts: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, Gradients]:
    """The output, and gradients of tokens ("x"), of "weights" and of every parameter by name."""
    experts.zero_grad(set_to_none=True)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = run(experts, x, weights, ids)
    out.backward(rows(len(x), 7, x.dtype))
    named = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return out.detach(), {"x": x.grad, "weights": weights.grad, **named}
