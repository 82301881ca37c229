"""Share the scoring of pools among ranks that hold the same queries."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torchtitan.distributed import ParallelDims

from components.core.base import Component, Target
from components.core.modules import modules_of
from components.core.problems import Problem
from components.models.glm_flash.indexer import PoolSelector
from components.models.glm_flash.sharded_selector import ShardedSelector
from components.models.glm_flash.with_indexer import has_indexer, no_indexer
from components.titan.plan import ParallelizeFn, RunPlan

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.trainer import RecipeTrainer

_DEGREE = "parallelism.tensor_parallel_degree"
"""Tensor ranks hold the same queries; context ranks do not."""


class IndexerSharding(Component):
    """Ranks that hold the same queries each score some of them and exchange the chosen ids.

    Scoring is the part of sparse attention that grows with the square of a document's length.
    Ids are 4 bytes per pool and token: 268 MB per layer at 131,072 tokens and 512 pools. The choice
    is that of one rank, to the bit, and is kept for backward, so ids travel once per step.
    """

    name = "indexer_sharding"
    summary = "ranks with the same queries share the scoring of pools and exchange int32 ids"
    source = "SkyRL, pull request 2179 (scores sharded by query rows); blocks dealt back and forth"
    scalars = {
        "indexer/received": "pool ids that this rank received per step, MiB",
        "indexer/time_saved": "scoring time that sharing saved this rank per step, exchange "
        "deducted, ms",
    }

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        pass

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        model, parallel = recipe.model, recipe.parallelism
        if not has_indexer(model):
            yield no_indexer(self.path)
        elif parallel.tensor_parallel_degree == 1:
            yield Problem(
                f"{self.path}.enabled",
                f"true has no effect: no two ranks hold the same queries where {_DEGREE} is 1",
                f"use a degree of 2 or more, or {self.path}.enabled=false",
            )

    def apply(self, plan: RunPlan) -> None:
        plan.swap(self.name, PoolSelector.Config, lambda c: ShardedSelector.Config(inner=c))
        plan.wrap_parallelize(_connecting)

    def before_step(self, trainer: "RecipeTrainer") -> None:
        for selector in modules_of(trainer.model_parts, ShardedSelector):
            selector.meter.reset()

    def metrics(self, trainer: "RecipeTrainer") -> dict[str, float]:
        meters = [selector.meter for selector in modules_of(trainer.model_parts, ShardedSelector)]
        return {
            "indexer/received": sum(meter.nbytes for meter in meters) / 2**20,
            "indexer/time_saved": 1e3 * sum(meter.seconds_saved for meter in meters),
        }


def _connecting(parallelize: ParallelizeFn) -> ParallelizeFn:
    def parallelize_and_connect(
        model: nn.Module, *, parallel_dims: ParallelDims, **others: Any
    ) -> nn.Module:
        """Tell selectors their ranks, whatever wraps them afterwards."""
        mesh = parallel_dims.get_optional_mesh("tp")
        if mesh is None:
            raise ValueError(
                "components.indexer_sharding.enabled: true shares scoring over tensor ranks, and "
                f"{_DEGREE} is 1; legal: 2 or more"
            )
        for selector in modules_of([model], ShardedSelector):
            selector.group = mesh.get_group()
        return parallelize(model, parallel_dims=parallel_dims, **others)

    return parallelize_and_connect
