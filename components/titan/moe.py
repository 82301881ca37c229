"""torchtitan's mixture-of-experts parts where a model must reach behind their public side."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.spmd_types import current_spmd_mesh, maybe_set_sparse_mesh
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import (
    AllToAllDispatchMetadata,
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
)

from kernels.combine import rounded_sum, weighted_sum_reference


class SummingDispatcher(AllToAllTokenDispatcher):
    """torchtitan's dispatcher, with a function of its own that weighs and sums.

    torchtitan's keeps a float32 copy of all outputs for backward, also where they are bfloat16, and
    on a GPU sorts their places.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    kernel: ClassVar[Callable[..., torch.Tensor]]
    """What sums: a function like ``kernels.combine.weighted_sum``."""

    def combine(
        self,
        routed_output_RD: torch.Tensor,
        metadata: AllToAllDispatchMetadata | LocalDispatchMetadata,
        x_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Expert outputs (R, D) back to their ranks, weighted and summed to (T, D)."""
        rows = routed_output_RD
        if isinstance(metadata, AllToAllDispatchMetadata):
            rows = self._return_rows(rows, metadata)
        # Rows are sorted by expert; a stable sort by token finds each token's K rows.
        place = metadata.token_indices_experts_sorted_N.argsort(stable=True).view(-1, self.top_k)
        return self.kernel(rows, place, metadata.topk_scores_experts_sorted_N[place])

    def _return_rows(self, rows: torch.Tensor, metadata: AllToAllDispatchMetadata) -> torch.Tensor:
        rows = self._unpermute(rows, metadata.input_shape, metadata.permuted_indices)
        with maybe_set_sparse_mesh():
            mesh = current_spmd_mesh() or self.ep_mesh
            assert mesh is not None
            splits = metadata.input_splits, metadata.output_splits
            rows = self._combine_token_exchange(rows, mesh.get_group("ep"), *splits)
        # A kernel reads memory: it does not wait for an exchange as torch's own operations do.
        return wait_tensor(rows) if isinstance(rows, AsyncCollectiveTensor) else rows


class UnroundedDispatcher(SummingDispatcher):
    """torchtitan's dispatcher, summing a token's experts in float32 and rounding once.

    torchtitan rounds every weighted output to the tokens' dtype first.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SummingDispatcher.Config):
        pass

    kernel: ClassVar[Callable[..., torch.Tensor]] = staticmethod(weighted_sum_reference)


class RoundedDispatcher(SummingDispatcher):
    """torchtitan's dispatcher, and its sums, keeping the outputs themselves for backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(SummingDispatcher.Config):
        pass

    kernel: ClassVar[Callable[..., torch.Tensor]] = staticmethod(rounded_sum)


class BiasedMoE(MoE):
    """torchtitan's layer whose selection bias exists, and is saved, also when it is frozen.

    It also knows of padding: rows that stand for no token are routed, and not counted.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.expert_bias_E is None:
            del self.expert_bias_E
            self.register_buffer("expert_bias_E", torch.zeros(config.num_experts))
        self._padding = 0
        self._part: tuple[int, int] | None = None
        self.router.register_forward_hook(self._uncount)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """See torchtitan's ``Module``."""
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("tp")
        # Experts' ranks are given the tokens that they hold; slices of experts all tokens.
        if mesh is not None and parallel_dims.ep_enabled:
            self._part = mesh.get_local_rank(), mesh.size()

    def forward(self, x_BLD: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """(B, L, D) -> (B, L, D); the last ``padding`` tokens of all tensor ranks are none."""
        self._padding = padding
        return super().forward(x_BLD)

    @torch.no_grad()
    def _uncount(self, router: nn.Module, args: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        if not self.training or not self._padding:
            return
        ids = outputs[1]
        rank, ranks = self._part or (0, 1)
        held = ids.shape[1]
        tokens = min(max((ranks - rank) * held - self._padding, 0), held)
        padded = ids[:, tokens:].flatten()
        self.tokens_per_expert_E.sub_(padded.bincount(minlength=len(self.tokens_per_expert_E)))

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        super()._init_self_buffers(buffer_device=buffer_device)
        if self.load_balance_coeff is None:
            self.expert_bias_E = torch.zeros_like(self.tokens_per_expert_E)


class ForcibleRouter(TokenChoiceTopKRouter):
    """A router's settings and projection; subclasses route, and honour ``forced``."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def limited(self, scores: torch.Tensor) -> torch.Tensor:
        """Minus infinity outside the best groups of experts (B, L, E); torchtitan's rule."""
        return self._get_node_limited_routing_scores(scores)

    def forced(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Expert ids and their scores (B, L, K) under forced balance; None when it is off."""
        if not self._debug_force_load_balance:
            return None
        return self._debug_force_load_balance_routing(scores)


def force_balance(router: TokenChoiceTopKRouter.Config, forced: bool) -> None:
    """Set whether every expert gets as many tokens (``debug.moe_force_load_balance``)."""
    router._debug_force_load_balance = forced
