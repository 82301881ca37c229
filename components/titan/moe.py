"""torchtitan's mixture-of-experts parts where a model must reach behind their public side."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
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
    """torchtitan's layer whose selection bias exists, and is saved, also when it is frozen."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.expert_bias_E is None:
            del self.expert_bias_E
            self.register_buffer("expert_bias_E", torch.zeros(config.num_experts))

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
