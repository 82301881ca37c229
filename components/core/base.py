"""What a memory technique is: one class holding everything the project knows about it.

To add a technique, write one module in this package with one ``Component`` subclass. Nothing else
needs editing: the class is found here, its settings appear in every recipe's schema under
``components.<name>``, and its checks, its changes to the run and its metrics are picked up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchtitan.config import Configurable

from components.core.problems import Problem

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.plan import RunPlan
    from components.titan.trainer import RecipeTrainer


class Component(Configurable):
    """A memory technique that a recipe switches on or off.

    Off means absent: the run is then torchtitan's stock path for whatever the technique replaces.
    """

    name: ClassVar[str]
    """Key under ``components:`` in a recipe."""

    summary: ClassVar[str]
    """One line: what it saves and what it costs."""

    source: ClassVar[str] = ""
    """Paper section or library the technique comes from."""

    requires: ClassVar[tuple[str, ...]] = ()
    """Names of components that must be on as well."""

    excludes: ClassVar[tuple[str, ...]] = ()
    """Names of components that cannot be on at the same time."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enabled: bool = False
        """Whether the technique is on."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def path(self) -> str:
        """Dotted key of this component's section."""
        return f"components.{self.name}"

    def check(self, recipe: "Recipe") -> Iterator[Problem]:
        """Why this recipe cannot use the technique, or would gain nothing from it.

        Called only when the component is enabled, before anything is allocated.
        """
        return iter(())

    def apply(self, plan: "RunPlan") -> None:
        """Change the run: swap configs, wrap the parallelisation, hook the optimizer.

        Called once per rank, before the trainer is built. Seams that only one component may own
        (the loss, the checkpointing policy, the optimizer) are claimed through ``plan``.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how it changes the run")

    def metrics(self, trainer: "RecipeTrainer") -> dict[str, float]:
        """Scalars for the log and TensorBoard, named ``<component>/<what>_<unit>``."""
        return {}
