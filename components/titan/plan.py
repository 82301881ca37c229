"""The run while it is being assembled: what components may change, and who changed it."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torchtitan.components.loss import BaseLoss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import override as override_module  # noqa: F401  (registers the registry)
from torchtitan.config.override import _REGISTRY
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

if TYPE_CHECKING:
    from components.core.recipe import Recipe

ParallelizeFn = Callable[..., nn.Module]
OptimizerHook = Callable[[OptimizersContainer, list[nn.Module], Any], None]


class RunPlan:
    """torchtitan's ``Trainer.Config`` under construction, with one owner per exclusive seam.

    Attributes:
        recipe: the typed recipe (read only).
        config: the configuration to be run; components edit it through the methods here.
        device: "cpu" or "cuda".
        world_size: ranks in the job.
    """

    def __init__(
        self, recipe: "Recipe", config: Trainer.Config, device: str, world_size: int
    ) -> None:
        self.recipe = recipe
        self.config = config
        self.device = device
        self.world_size = world_size
        self._owners: dict[str, str] = {}

    @property
    def spec(self) -> ModelSpec:
        """The model: its config tree and the functions that parallelise it."""
        assert self.config.model_spec is not None
        return self.config.model_spec

    @property
    def model(self) -> BaseModel.Config:
        """The model's config tree."""
        return self.spec.model

    def set_loss(self, owner: str, loss: BaseLoss.Config) -> None:
        """Replace the loss. One component only."""
        self._claim("the loss", owner)
        self.config.loss = loss

    def set_activation_checkpoint(self, owner: str, policy: ActivationCheckpointing.Config) -> None:
        """Replace the checkpointing policy. One component only."""
        self._claim("the activation checkpointing policy", owner)
        self.config.activation_checkpoint = policy

    def set_optimizer(self, owner: str, optimizer: OptimizersContainer.Config) -> None:
        """Replace the optimizer container. One component only."""
        self._claim("the optimizer", owner)
        self.config.optimizer = optimizer

    def override(self, factory: Callable, **kwargs: Any) -> None:
        """Swap parts of the model with a torchtitan ``@override`` factory.

        Raises:
            ValueError: the override matches nothing in this run, so it would do nothing.
        """
        target = f"{factory.__module__}.{factory.__name__}"
        if not self.matches(factory):
            raise ValueError(f"override {target} matches no part of model {self.spec.flavor!r}")
        self.config.override.imports.append((target, kwargs) if kwargs else target)

    def matches(self, factory: Callable) -> bool:
        """Whether an ``@override`` factory would replace anything in this run."""
        entry = _REGISTRY[f"{factory.__module__}.{factory.__name__}"]
        return any(
            entry.matches(fqn) and (not entry.exact or type(config) is entry.target_cls)
            for fqn, config, _, _ in self.config.traverse(entry.target_cls)
        )

    def wrap_parallelize(self, wrap: Callable[[ParallelizeFn], ParallelizeFn]) -> None:
        """Run code around the model's ``parallelize_fn`` (before or after FSDP is applied)."""
        spec = self.spec
        self.config.model_spec = dataclasses.replace(spec, parallelize_fn=wrap(spec.parallelize_fn))

    def after_optimizer(self, hook: OptimizerHook, first: bool = False) -> None:
        """Call ``hook(optimizers, model_parts, parallel_dims)`` once the optimizer exists.

        Args:
            first: before the hooks registered so far instead of after them.
        """
        spec = self.spec
        present = [spec.post_optimizer_build_fn] if spec.post_optimizer_build_fn else []
        hooks = [hook, *present] if first else [*present, hook]

        def run_all(*args: Any) -> None:
            for each in hooks:
                each(*args)

        self.config.model_spec = dataclasses.replace(spec, post_optimizer_build_fn=run_all)

    def _claim(self, seam: str, owner: str) -> None:
        holder = self._owners.setdefault(seam, owner)
        if holder != owner:
            raise ValueError(
                f"components.{owner} and components.{holder} both replace {seam}; "
                "switch one of them off"
            )
