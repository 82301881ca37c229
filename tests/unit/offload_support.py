"""A small model on an offload engine, and lanes that count what they copy."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from components.offload.engine import Engine
from components.offload.slabs import Slab
from components.offload.streams import BesideOnCpu
from components.recompute.layer import RecomputedLayer

CPU = torch.device("cpu")
WIDTH, TOKENS = 8, 16
ONE = WIDTH * TOKENS * 4
"""Bytes of one boundary of ``Model``."""


class Watched(BesideOnCpu):
    """Counts copies and what they brought back that is alive."""

    def __init__(self, beside: bool) -> None:
        super().__init__(CPU)
        self.beside = beside  # type: ignore[misc]
        self.restored: list[StorageWeakRef] = []
        self.most_alive = 0
        self.sent = 0
        self.waited: list[object] = []

    def offload(self, source: torch.Tensor, target: torch.Tensor) -> object:
        super().offload(source, target)
        self.sent += 1
        return f"sent {self.sent}"

    def restore(self, source: torch.Tensor, after: object) -> tuple[torch.Tensor, object]:
        memory, _ = super().restore(source, after)
        self.restored.append(StorageWeakRef(memory.untyped_storage()))
        alive = sum(not reference.expired() for reference in self.restored)
        self.most_alive = max(self.most_alive, alive)
        return memory, f"restored {len(self.restored)}"

    def wait(self, mark: object) -> None:
        self.waited.append(mark)


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=random) / WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.weight)


class Model(nn.Module):
    """Layers that the engine is the store of."""

    def __init__(self, count: int = 6, store: Engine | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RecomputedLayer(Layer(seed)) for seed in range(count))
        if store is not None:
            for layer in self.layers:
                layer.store = store  # type: ignore[assignment]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def inputs(seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 + seed)
    # Not a leaf: boundaries of a model are computed.
    return torch.randn(TOKENS, WIDTH, generator=random).requires_grad_() * 1


def pass_through(model: Model, engine: Engine | None = None, seed: int = 0) -> list[torch.Tensor]:
    """Loss and gradients of one micro-batch."""
    model.zero_grad()
    if engine is not None:
        engine.begin()
    loss = model(inputs(seed)).square().mean()
    loss.backward()
    if engine is not None:
        engine.end()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def made(places: int, lanes: object, chosen: Iterator[int] | range, **more: object) -> Engine:
    return Engine(Slab(places * ONE, CPU), lanes, CPU, chosen, **more)  # type: ignore[arg-type]
