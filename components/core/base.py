"""What a memory technique is: one class holding everything the project knows about it.

To add a technique, write one module in ``components/`` with one ``Component`` subclass (or a
package with a module ``component``). Nothing else needs editing: the class is found there, its
settings appear in every recipe's schema under ``components.<name>``, and its checks, its changes to
the run, its hooks, its metrics and its memory terms are picked up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torchtitan.config import Configurable

from components.core.problems import Problem

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.plan import RunPlan
    from components.titan.trainer import RecipeTrainer

Inputs = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""Token ids (B, L), labels (B, L) and keyword arguments of the model, all on the device."""


@dataclass(frozen=True)
class Target:
    """Where a recipe is to run.

    Attributes:
        device: "cpu" or "cuda".
        ranks: processes in the job.
        memory: bytes of one device, or None when the recipe does not say.
    """

    device: str
    ranks: int
    memory: int | None = None


@dataclass(frozen=True)
class MemoryTerm:
    """Memory that one rank needs for one thing.

    Attributes:
        name: what it is for.
        nbytes: bytes on one rank; negative for what a technique takes away from another term.
        where: "device" or "host".
        note: what the figure leaves out, or "".
    """

    name: str
    nbytes: int
    where: Literal["device", "host"] = "device"
    note: str = ""


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

    after: ClassVar[tuple[str, ...]] = ()
    """Names of components that are applied before this one when they are on. Otherwise the order is
    alphabetical; it matters only where two wrap the same thing."""

    scalars: ClassVar[dict[str, str]] = {}
    """Names that ``metrics`` returns -> meaning with unit, for the glossary."""

    headlines: ClassVar[dict[str, str]] = {}
    """Names of scalars that belong in every step's line -> what they are called there."""

    relieves: ClassVar[str] = ""
    """What to try first on out-of-memory, e.g. "activations"; "" if it does not save memory."""

    changes_training: ClassVar[bool] = False
    """Whether the run learns something else with it than without. Then a run cannot be continued
    with other settings of it."""

    watches: ClassVar[tuple[str, ...]] = ()
    """Settings of such a technique that only look on: a run may be continued with others."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enabled: bool = False
        """Whether the technique is on."""

    config: Config

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def path(self) -> str:
        """Dotted key of this component's section."""
        return f"components.{self.name}"

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        """Why this recipe cannot use the technique, or would gain nothing from it.

        Called only when the component is on and the rest of the recipe is right, before anything
        is allocated.
        """
        return iter(())

    def apply(self, plan: "RunPlan") -> None:
        """Change the run: swap configs, wrap the parallelisation, hook the optimizer.

        Called in the launcher (to check the result) and again on every rank, each time with a plan
        of its own, so it must change nothing but the plan. Seams that only one component may own
        (the loss, the checkpointing policy, the optimizer, a part of the model) are claimed there.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how it changes the run")

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """What the technique adds to, or takes from, the memory of one rank."""
        return []

    def loss_term(self, recipe: "Recipe", target: Target) -> MemoryTerm | None:
        """What one rank needs while the loss is computed and no layer runs, from the component that
        replaces the loss; None from others, and from one that makes logits as torchtitan does."""
        return None

    def traffic(self, recipe: "Recipe", target: Target) -> list[str]:
        """What one rank sends to others for the technique, a line each, for `make check`."""
        return []

    def on_built(self, trainer: "RecipeTrainer") -> None:
        """The trainer stands: model, optimizer and loss exist, no checkpoint is loaded yet."""

    def before_step(self, trainer: "RecipeTrainer") -> None:
        """A step begins; ``trainer.step`` is its number."""

    def after_step(self, trainer: "RecipeTrainer") -> None:
        """The optimizer has stepped; gradients are still there."""

    def before_microbatch(self, trainer: "RecipeTrainer") -> None:
        """Forward and backward of one accumulation pass begin."""

    def after_microbatch(self, trainer: "RecipeTrainer") -> None:
        """Forward and backward of one accumulation pass are done."""

    def prepare_inputs(self, trainer: "RecipeTrainer", inputs: Inputs) -> Inputs:
        """Change what the model is given: masks are built, sequences have been cut over ranks."""
        return inputs

    def before_save(self, trainer: "RecipeTrainer") -> None:
        """A checkpoint is about to be written; bring state kept elsewhere up to date."""

    def metrics(self, trainer: "RecipeTrainer") -> dict[str, float]:
        """Scalars for the log and TensorBoard, named and described in ``scalars``.

        Called on every rank at the same steps (those that are logged), so it may be collective.
        """
        return {}

    def close(self) -> None:
        """The run is over, well or not: release streams, buffers and threads.

        Called before ``on_built`` where building the trainer failed.
        """
