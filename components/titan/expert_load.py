"""How unevenly tokens are spread over experts, as a metric of every MoE run."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from components.core.shards import local_of
from components.recompute.tape import recomputing
from components.titan.memory.places import clean_name, in_backward


class ExpertLoad:
    """Keeps each layer's token counts of the last step, read just before they are reset.

    torchtitan's bias balancing clears the counts in an optimizer pre-step hook, so this must be
    registered before it (``RunPlan.after_optimizer(..., first=True)``).
    """

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None
        self._names: list[str] = []
        self._passes: list[float] = []
        self._calls: list[_Calls] = []
        self._groups: list[dist.ProcessGroup] = []

    def attach(self, optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        """Start observing; a no-op for models without experts."""
        named = {
            name: module
            for part in model_parts
            for name, module in part.named_modules()
            if isinstance(getattr(module, "tokens_per_expert_E", None), torch.Tensor)
        }
        if not named:
            return
        layers = list(named.values())
        self._names = [clean_name(name) for name in named]
        self._calls = [_Calls(layer) for layer in layers]
        # Tensor ranks route the same tokens, unless experts are spread over them.
        names = ["loss", "tp"] if parallel_dims.ep_enabled else ["loss"]
        meshes = [parallel_dims.get_optional_mesh(name) for name in names]
        self._groups = [mesh.get_group() for mesh in meshes if mesh is not None]

        unbalanced = [x for x in layers if getattr(x, "load_balance_coeff", None) is None]

        def observe(*unused: Any) -> None:
            counts = [local_of(layer.get_buffer("tokens_per_expert_E")) for layer in layers]
            self._counts = torch.stack(counts).clone()
            self._passes = [calls.take() for calls in self._calls]
            for layer in unbalanced:
                # The balancing that clears the counts after each step is off for this layer.
                local_of(layer.get_buffer("tokens_per_expert_E")).zero_()

        optimizers.register_step_pre_hook(observe)

    def totals(self) -> dict[str, list[int]]:
        """Tokens of each expert in the last step, per layer, all data ranks. A collective call."""
        if self._counts is None:
            return {}
        counts = self._counts.clone()
        for group in self._groups:
            dist.all_reduce(counts, group=group)
        passes = torch.tensor(self._passes, device=counts.device).unsqueeze(1)
        return dict(zip(self._names, (counts / passes).round().long().tolist(), strict=True))

    @staticmethod
    def metrics(totals: dict[str, list[int]]) -> dict[str, float]:
        """Scalars of what ``totals`` returned."""
        if not totals:
            return {}
        layers = list(totals.values())
        experts = sum(len(layer) for layer in layers)
        return {
            "moe/max_over_mean_load": max(
                max(layer) * len(layer) / max(sum(layer), 1) for layer in layers
            ),
            "moe/idle_experts": sum(layer.count(0) for layer in layers) / experts,
        }


class _Calls:
    """How often a layer counted its tokens, for every time it ran outside of backward.

    torchtitan's recomputation makes it count again, unless no gradient passes the layer. A compiled
    layer counts once: what it recomputes leaves no trace in a buffer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._all = self._first = 0
        layer.register_forward_pre_hook(self._called)

    def _called(self, *unused: Any) -> None:
        if torch.compiler.is_compiling():
            # Nothing to count, and nothing that a graph could hold.
            return
        if recomputing():
            # It counts into nothing: see ``components.titan.counting``.
            return
        self._all += 1
        self._first += not in_backward()

    def take(self) -> float:
        """The ratio since the last call of this."""
        ratio = self._all / max(self._first, 1)
        self._all = self._first = 0
        return max(ratio, 1.0)
