"""Expert-parallel token exchange over gloo.

torchtitan's ``spmd_types`` backend exchanges uneven splits with the list form of all-to-all, which
gloo refuses; the single-tensor form works on gloo and NCCL alike.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.distributed_c10d import ProcessGroup
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


class GlooExchange:
    """The three exchanges of an all-to-all dispatcher, with the single-tensor collective."""

    ep_mesh: Any

    def _token_count_exchange(
        self, counts: torch.Tensor, pg: ProcessGroup, ep_size: int
    ) -> torch.Tensor:
        return all_to_all_single(counts.view(ep_size, -1), None, None, group=self.ep_mesh)

    def _dispatch_token_exchange(
        self, x: torch.Tensor, pg: ProcessGroup, output_splits: list[int], input_splits: list[int]
    ) -> torch.Tensor:
        return all_to_all_single(x, output_splits, input_splits, self.ep_mesh)

    def _combine_token_exchange(
        self, x: torch.Tensor, pg: ProcessGroup, input_splits: list[int], output_splits: list[int]
    ) -> torch.Tensor:
        return all_to_all_single(x, input_splits, output_splits, self.ep_mesh)


class GlooTokenDispatcher(GlooExchange, AllToAllTokenDispatcher):
    """torchtitan's all-to-all dispatcher over gloo."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass


@cache
def over_gloo(dispatcher: type[AllToAllTokenDispatcher]) -> type[AllToAllTokenDispatcher]:
    """The same dispatcher, whatever it adds to torchtitan's, with its exchanges over gloo."""
    if dispatcher is AllToAllTokenDispatcher:
        return GlooTokenDispatcher
    if issubclass(dispatcher, GlooExchange):
        return dispatcher
    config: type = dataclass(kw_only=True, slots=True)(type("Config", (dispatcher.Config,), {}))
    name = f"Gloo{dispatcher.__name__}"
    return type(name, (GlooExchange, dispatcher), {"Config": config})


@override(target=AllToAllTokenDispatcher.Config, description="single-tensor all-to-all")
def gloo(cfg: AllToAllTokenDispatcher.Config) -> AllToAllTokenDispatcher.Config:
    owner = type(cfg)._owner
    assert owner is not None and issubclass(owner, AllToAllTokenDispatcher)
    return derive(cfg, over_gloo(owner).Config)
