"""Parts of GLM-5.3-Flash in two forms, whole and in chunks, with the same weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from components.models.glm_flash.chunked.overrides import (
    chunked_dsa,
    chunked_feed_forward,
    chunked_kda,
)
from components.models.glm_flash.documents import Documents
from tests.unit.models_support import tiny_glm

DIM = 32
KINDS = ("kda", "dsa", "feed_forward")

Run = Callable[[torch.Tensor], torch.Tensor]


def config_of(kind: str, chunk_tokens: int | None = None) -> Any:
    """The config of one part of a small model; ``chunk_tokens`` None: whole."""
    model = tiny_glm(
        dim=DIM, kda_heads=2, kda_head_dim=8, n_heads=2, q_lora_rank=16, kv_lora_rank=8,
        qk_head_dim=8, v_head_dim=8, index_n_heads=2, index_head_dim=8, index_topk=16,
        dense_hidden_dim=48,
    )  # fmt: skip
    first, *_, last = model.build_spec().model.layers
    config, chunked = {
        "kda": (first.attention, chunked_kda),
        "dsa": (last.attention, chunked_dsa),
        "feed_forward": (first.feed_forward, chunked_feed_forward),
    }[kind]
    return config if chunk_tokens is None else chunked(config, chunk_tokens=chunk_tokens)


def randomise(module: nn.Module) -> None:
    """Values at which every term matters; initial ones leave several neutral."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5
        shift = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.data.copy_(shift + scale * noise)


def build(config: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The part with random weights, all of ``dtype``; its indexer frozen, as in training."""
    part = config.build()
    randomise(part)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_("indexer" not in name)
    return part.to(dtype)


def pair(
    kind: str, chunk_tokens: int, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, nn.Module]:
    """The same part whole and in chunks."""
    return build(config_of(kind), dtype), build(config_of(kind, chunk_tokens), dtype)


def runner(part: nn.Module, lengths: tuple[int, ...]) -> Run:
    """The part as a function of (T, DIM); one row of documents of these lengths."""
    if not hasattr(part, "o_proj"):
        return lambda x: part(x.unsqueeze(0)).squeeze(0)
    documents = Documents.from_lengths(lengths)
    return lambda x: part(x.unsqueeze(0), documents).squeeze(0)


def draw(rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, DIM, generator=generator, dtype=torch.float64).to(dtype)


def gradients(
    part: nn.Module, run: Run, x: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The output, and gradients of the input ("x") and of every parameter by name."""
    part.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = run(x)
    out.backward(draw(len(x), 1, x.dtype))
    return out.detach(), {"x": x.grad, **{n: p.grad for n, p in part.named_parameters()}}


@dataclass
class Calls:
    """Row counts of the calls of a method, and of how many of them gradients were on."""

    rows: list[int] = field(default_factory=list)
    with_graph: list[bool] = field(default_factory=list)


@contextmanager
def counted(owner: Any, name: str) -> Iterator[Calls]:
    """Write down calls of the function ``owner.name``, whose first tensor has the rows."""
    present, original, calls = vars(owner)[name], getattr(owner, name), Calls()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.rows.append(len(next(x for x in args if isinstance(x, torch.Tensor))))
        calls.with_graph.append(torch.is_grad_enabled())
        return original(*args, **kwargs)

    setattr(owner, name, staticmethod(call) if isinstance(present, staticmethod) else call)
    try:
        yield calls
    finally:
        setattr(owner, name, present)
