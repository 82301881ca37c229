"""Stand-ins for the kernels of sparse attention: the definitions, on any device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.config.override import apply_overrides

from components.core.recipe import Recipe
from components.titan.build import prepare
from kernels.backends.ops import SPARSE_MLA
from kernels.backends.registry import Backend, Operation
from kernels.dsa.keys import selected_tokens
from kernels.dsa.pooling import Pools
from kernels.dsa.select import pool_scores
from kernels.precision import accumulation_dtype


class Gathering:
    """Follows ``SparseMlaKernels`` on any device, in full precision; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.most_queries = 0

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, pools: torch.Tensor, position: torch.Tensor,
        start: torch.Tensor, *, size: int, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        self._count("forward", q)
        _, keys, logits = self._logits(q, latent, pools, position, start, size, scale)
        out = torch.einsum("qhk,qkr->qhr", logits.softmax(-1), keys)
        return out.to(q.dtype), logits.logsumexp(-1)

    def backward(
        self, q: torch.Tensor, latent: torch.Tensor, pools: torch.Tensor, position: torch.Tensor,
        start: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor,
        dlatent: torch.Tensor, *, size: int, scale: float, probabilities: bool, deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        self._count("deterministic backward" if deterministic else "backward", q)
        tokens, keys, logits = self._logits(q, latent, pools, position, start, size, scale)
        p = (logits - lse.unsqueeze(-1)).exp()
        grad = grad.to(p.dtype)
        inner = (grad * out.to(p.dtype)).sum(-1, keepdim=True)
        grad_logits = p * (torch.einsum("qhr,qkr->qhk", grad, keys) - inner) * scale
        grad_keys = torch.einsum("qhk,qhr->qkr", p, grad)
        grad_keys += torch.einsum("qhk,qhr->qkr", grad_logits, q.to(p.dtype))
        dlatent.index_add_(0, tokens.flatten(), grad_keys.flatten(0, 1))
        dq = torch.einsum("qhk,qkr->qhr", grad_logits, keys).to(q.dtype)
        if not probabilities:
            return dq, None
        in_pools = p.sum(1)[:, : pools.shape[1] * size]
        return dq, in_pools.unflatten(1, (pools.shape[1], size)).sum(2)

    def _count(self, what: str, q: torch.Tensor) -> None:
        assert q.is_contiguous()
        self.calls.append(what)
        self.most_queries = max(self.most_queries, len(q))

    def _logits(self, q: torch.Tensor, latent: torch.Tensor, *place: Any) -> tuple[Any, Any, Any]:
        assert q.dtype == latent.dtype
        *of_rows, size, scale = place
        wide = accumulation_dtype(q.dtype)
        tokens, used = selected_tokens(*of_rows, size)
        keys = latent[tokens].to(wide)
        logits = torch.einsum("qhr,qkr->qhk", q.to(wide), keys) * scale
        return tokens, keys, logits.masked_fill(~used.unsqueeze(1), float("-inf"))


class Sorting:
    """Follows ``IndexerKernels`` on any device; counts its queries."""

    def __init__(self) -> None:
        self.queries: list[int] = []

    def select_pools(
        self, queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, pools: Pools,
        position: torch.Tensor, lengths: tuple[int, ...], *, size: int, count: int, scale: float,
        begin: int = 0, key_factors: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self.queries.append(len(queries))
        first = pools.before[begin : begin + len(queries)]
        end, count = first + (position + 1) // size, min(count, max(lengths) // size)
        scores = pool_scores(queries, weights, keys, scale)
        scores = scores if key_factors is None else scores * key_factors
        chosen = torch.full((len(queries), count), -1, dtype=torch.int32)
        for row, low, high in zip(range(len(queries)), first.tolist(), end.tolist(), strict=True):
            some = scores[row, low:high]
            order = torch.sort(some, descending=True, stable=True).indices[:count]
            chosen[row, : len(order)] = order.sort().values.int()
        return chosen


def prepared_selector(recipe: Recipe, run_dir: Path) -> Any:
    """What chooses pools in the fourth layer of a recipe's model, as a run on the
    CPU configures it."""
    run = prepare(recipe, run_dir, "cpu", 1)
    assert run.config.model_spec is not None
    apply_overrides(run.config.override, run.config)
    return run.config.model_spec.model.layers[3].attention.indexer.selector


def offer(
    monkeypatch: pytest.MonkeyPatch,
    kernels: Any,
    name: str = "fake",
    operation: Operation = SPARSE_MLA,
) -> None:
    """Register ``kernels`` as a backend that runs everywhere and that "auto" takes."""
    backend = Backend(name, lambda: kernels, automatic=True)
    monkeypatch.setitem(operation.backends, name, backend)
    monkeypatch.setitem(operation.loaded, name, kernels)
