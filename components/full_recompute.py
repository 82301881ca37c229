"""Recompute every layer in the backward pass."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.distributed.activation_checkpoint import FullAC

from components.core.base import Component, MemoryTerm, Target
from components.core.sizes import hidden_state
from components.titan.plan import RunPlan

if TYPE_CHECKING:
    from components.core.recipe import Recipe


class FullRecompute(Component):
    """Keep only each layer's input; run the layer's forward again in backward.

    torchtitan's ``FullAC``. Saves all activations inside the layers; costs one more forward.
    """

    name = "full_recompute"
    summary = "keep one hidden state per layer and recompute the rest in backward"
    source = "torchtitan FullAC; arXiv 1604.06174"
    relieves = "activations"

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        preserve_rng_state: bool = True
        """Replay the random numbers of the forward; only models that draw some need it."""

    config: Config

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """The hidden states between layers, which are kept for backward."""
        size = recipe.model.n_layers * hidden_state(recipe)
        return [MemoryTerm("hidden states between layers, kept for backward", size)]

    def apply(self, plan: RunPlan) -> None:
        policy = FullAC.Config(preserve_rng_state=self.config.preserve_rng_state)
        plan.set_activation_checkpoint(self.name, policy)
