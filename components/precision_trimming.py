"""Keep low-precision inputs for backward instead of what was computed from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from components.core.base import Component, Target
from components.core.problems import Problem
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.trimmed import SITES, trimmed
from components.titan.plan import RunPlan

if TYPE_CHECKING:
    from components.core.recipe import Recipe

_OF_EXPERTS = ("router", "expert_combine")


class PrecisionTrimming(Component):
    """Off: plain autograd, which keeps what a straightforward implementation does: copies of the
    residual streams in float32, normalised values, the experts' weighted outputs in float32.

    On: every site keeps its inputs in their own dtype and computes the rest again in backward, a
    block of rows at a time, so that no copy of all tokens in float32 exists at any moment.

    Agreement of on and off, outputs and every gradient ("bits": equal to the bit; "order": within
    the order of summation, that is, the rounding of sums of the same products):

    * ``hyper_connections``: reading the streams bits; mapping, mixing matrix and merge order. In
      bfloat16 the merge's gradients are closer to exact: plain autograd rounds them at every step.
    * ``router``: order; bits in float32, where nothing is upcast, within one block of rows.
    * ``rms_norm``, both norms: bits. Beyond one block of rows (``kernels.row_blocks``) the blocks'
      gradients of a weight are summed in float32.
    * ``expert_combine``: the sum over experts order; gradients of the experts' outputs bits, of the
      weights order.
    * ``swiglu``: bits.

    Index scores need no switch: they are computed without gradients, and
    ``components.indexer_training`` differentiates them inside a function that keeps its inputs and
    scores a window of queries at a time; its definition would keep tokens x heads x pools. Logits
    are ``components.chunked_loss``'s: with it they never exist for a whole sequence.
    """

    name = "precision_trimming"
    summary = "keep bf16 inputs for backward instead of fp32 copies; cheap parts run again"
    source = "DeepSeek-V3, arXiv 2412.19437, section 3.2.3; mHC, arXiv 2512.24880, section 4"
    relieves = "activations"

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        hyper_connections: bool = True
        """mHC: mapping, mixing matrix, reading and merging keep the streams themselves."""

        router: bool = True
        """Router logits keep the tokens themselves, not a float32 copy."""

        rms_norm: bool = True
        """RMS norms, KDA's gated one included, keep their inputs alone."""

        expert_combine: bool = True
        """The sum over a token's experts keeps their outputs, not float32 products."""

        swiglu: bool = True
        """Clamped SwiGLU keeps gate and up, not their clamped copies and the activation."""

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        if not isinstance(recipe.model, GlmFlashModel):
            yield Problem(
                f"{self.path}.enabled",
                "true needs a model with sites to trim; torchtitan's own layers have none: their "
                "fused RMS norm keeps its input alone, and their combine rounds its products",
                "use a glm_flash model, or leave it out",
            )
            return
        wanted = self._wanted()
        if not wanted:
            yield Problem(
                f"{self.path}.enabled",
                "true with every site off saves nothing",
                f"switch one of {', '.join(SITES)} on, or leave it out",
            )
        for site in _OF_EXPERTS:
            if site in wanted and recipe.model.n_experts is None:
                yield Problem(
                    f"{self.path}.{site}",
                    "true finds nothing to replace: with model.n_experts null every layer is dense",
                    "use false",
                )

    def apply(self, plan: RunPlan) -> None:
        for site in self._wanted():
            for kind, kernels in SITES[site].items():
                plan.swap(f"{self.name}.{site}", kind, partial(trimmed, kernels=kernels))

    def _wanted(self) -> list[str]:
        return [site for site in SITES if getattr(self.config, site)]
