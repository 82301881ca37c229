"""Recompute layers in the backward pass, keeping every choice and one input per k layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.core.base import Component, MemoryTerm, Target
from components.core.problems import Problem
from components.core.sizes import hidden_state
from components.models.glm_flash.settings import GlmFlashModel
from components.recompute import terms
from components.recompute.policy import LayerRecomputePolicy
from components.titan.plan import RunPlan
from components.titan.router import keep_choices

if TYPE_CHECKING:
    from components.core.recipe import Recipe


class LayerRecompute(Component):
    """Keep the input of every k-th layer; rebuild the others and run each layer again in backward.

    Chosen experts and chosen pools are kept and never chosen again: a second top-k may differ from
    the first, and its gradients would belong to another model. Losses and gradients are those of
    the run without, to the bit.
    """

    name = "layer_recompute"
    summary = "one hidden state per k layers; costs one more forward, two with k above 1"
    source = "arXiv 1604.06174"
    relieves = "activations"
    excludes = ("full_recompute",)

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        every: int = 1
        """Layers per kept hidden state, 1 to model.n_layers. k divides what is kept by k; while a
        group of k layers runs backward, k - 1 more exist, and all but one run forward once more."""

        keep_sublayers: bool = False
        """With every above 1 and several residual streams: keep the output of every mixer and
        feed-forward part (model.dim numbers per token each), so that rebuilding a layer's input
        only merges them into the streams. Every part then runs twice instead of three times."""

        preserve_rng_state: bool = True
        """Draw the same random numbers again; only models that draw some need it."""

        def __post_init__(self) -> None:
            if self.every < 1:
                raise ValueError(f"every is {self.every}; it must be at least 1")

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        config, n_layers = self.config, recipe.model.n_layers
        if config.every > n_layers:
            yield Problem(
                f"{self.path}.every",
                f"{config.every} is more than model.n_layers = {n_layers}",
                f"use 1 to {n_layers}; the square root of the number of layers keeps least",
            )
        if config.keep_sublayers and config.every == 1:
            yield Problem(
                f"{self.path}.keep_sublayers",
                f"true saves nothing with {self.path}.every = 1, where no input is rebuilt",
                f"use false, or {self.path}.every 2 or more",
            )
        model = recipe.model
        several = isinstance(model, GlmFlashModel) and model.hc_mult > 1
        if config.keep_sublayers and not several:
            yield Problem(
                f"{self.path}.keep_sublayers",
                "true needs a model with several residual streams; with one stream, the two "
                "outputs of a layer take more memory than its input",
                "use false, or a glm_flash model with model.hc_mult above 1",
            )
        if recipe.compile.enable and "model" in recipe.compile.components:
            compiled = ", ".join(recipe.compile.components)
            yield Problem(
                "compile.components",
                f"[{compiled}] compiles layers, and what {self.path} keeps of a layer is lost in "
                "a compiled one",
                "use [loss], compile.enable=false, or components.full_recompute instead",
            )

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """What is kept for backward, and what exists while one group of layers runs backward."""
        config, model = self.config, recipe.model
        kept = -(-model.n_layers // config.every)
        chosen = terms.choices(recipe)
        found = [
            MemoryTerm(
                "hidden states between layers, kept for backward",
                kept * hidden_state(recipe),
            )
        ]
        if config.every > 1:
            rebuilt = (config.every - 1) * hidden_state(recipe)
            found.append(MemoryTerm("hidden states of one group of layers, rebuilt", rebuilt))
        if chosen:
            found.append(MemoryTerm("chosen experts and pools, kept for backward", chosen))
        if config.keep_sublayers:
            count = sum(terms.kept_sublayers(recipe, layer) for layer in range(model.n_layers))
            outputs = count * terms.output_bytes(recipe)
            found.append(MemoryTerm("outputs of mixers and feed-forward parts, kept", outputs))
        return found

    def apply(self, plan: RunPlan) -> None:
        policy = LayerRecomputePolicy.Config(
            every=self.config.every,
            keep_sublayers=self.config.keep_sublayers,
            preserve_rng_state=self.config.preserve_rng_state,
        )
        plan.set_activation_checkpoint(self.name, policy)
        plan.default_override(keep_choices)
