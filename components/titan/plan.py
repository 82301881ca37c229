"""The run while it is being assembled: what components may change, and who changed it."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torchtitan.components.loss import BaseLoss
from torchtitan.components.optimizer import OptimizersContainer
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
        self._replaced: set[str] = set()
        self._defaults: list[Callable] = []

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

    def override(self, owner: str, factory: Callable, **kwargs: Any) -> None:
        """Swap parts of the model with a torchtitan ``@override`` factory.

        Args:
            owner: name of the component.
            factory: decorated with ``@override``; ``kwargs`` are handed to it.

        Raises:
            ValueError: it matches nothing in this run, or a part that another component replaces.
        """
        nodes = self._nodes(factory)
        if not nodes:
            message = f"replaces no part of model {self.spec.name!r} ({_target(factory)})"
            raise ValueError(f"components.{owner} {message}")
        for fqn in nodes:
            self._claim(fqn, owner)
        self._replaced |= set(nodes)
        target = _target(factory)
        self.config.override.imports.append((target, kwargs) if kwargs else target)

    def swap(self, owner: str, target: type, change: Callable[[Any], Any]) -> None:
        """Replace parts of the model in its config tree, also inside parts that others override.

        Args:
            owner: dotted name of the component, or of its key that asks for this.
            target: type of the parts' configs; subclasses count.
            change: config of a part -> config of what takes its place.

        Raises:
            ValueError: no such part in this run, or one that another component replaces.
        """
        nodes = list(self.config.traverse(target))
        if not nodes:
            raise ValueError(
                f"components.{owner} replaces no part of model {self.spec.name!r} "
                f"({target.__qualname__}); legal here: false"
            )
        for fqn, config, parent, attribute in nodes:
            self._claim(fqn, owner)
            assert attribute is not None
            _put(parent, attribute, change(config))

    def default_override(self, factory: Callable) -> None:
        """Swap the parts that no component replaces; done when all components have been applied."""
        self._defaults.append(factory)

    def finish(self) -> set[Callable]:
        """Apply the default overrides to what is left. Call once, after the components.

        Returns:
            Those for which nothing is left.
        """
        idle = set(self._defaults)
        for factory in self._defaults:
            entry, target = _REGISTRY[_target(factory)], _target(factory)
            free = []
            for fqn, (config, parent, attribute) in self._nodes(factory, everywhere=True).items():
                if fqn in self._replaced:
                    continue
                if any(fqn.startswith(f"{claimed}.") for claimed in self._replaced):
                    # torchtitan allows no override inside an overridden part: change it in place.
                    _put(parent, attribute, entry.factory(config))
                    idle.discard(factory)
                else:
                    free.append(fqn)
            if free:
                # torchtitan selects by pattern; a plain name is the pattern of itself.
                _REGISTRY[target] = dataclasses.replace(entry, fqns=free)
                self.config.override.imports.append(target)
                idle.discard(factory)
        return idle

    def _nodes(self, factory: Callable, everywhere: bool = False) -> dict[str, Any]:
        """Name -> (config, parent, attribute) of the parts that a factory replaces."""
        entry = _REGISTRY[_target(factory)]
        return {
            fqn: (config, parent, attribute)
            for fqn, config, parent, attribute in self.config.traverse(entry.target_cls)
            if (everywhere or entry.matches(fqn))
            and (not entry.exact or type(config) is entry.target_cls)
        }

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


def _target(factory: Callable) -> str:
    """The name under which torchtitan knows an ``@override`` factory."""
    return f"{factory.__module__}.{factory.__name__}"


def _put(parent: Any, attribute: str | int, value: Any) -> None:
    if isinstance(attribute, int):
        parent[attribute] = value
    else:
        setattr(parent, attribute, value)
