"""Keep low-precision inputs for backward instead of what was computed from them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from components.core.base import Component, Target
from components.core.problems import Problem
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.trimmed import SITES, trimmed
from components.titan.combine import keep_outputs
from components.titan.plan import RunPlan

if TYPE_CHECKING:
    from components.core.recipe import Recipe

_OF_EXPERTS = ("router", "expert_combine")

_NOT_IN_TITAN = MappingProxyType(
    {
        "hyper_connections": "torchtitan's models have one residual stream",
        "router": "torchtitan's router has no other form; its copy is one of a token, not of top_k",
        "rms_norm": "torchtitan's fused RMS norm keeps its input alone",
        "swiglu": "torchtitan's SwiGLU clamps nothing and has no other form",
    }
)
"""Site -> why a model of torchtitan's layers has none."""


class PrecisionTrimming(Component):
    """Off: plain autograd, which keeps what a straightforward implementation does: copies of the
    residual streams in float32, normalised values, the experts' weighted outputs in float32.

    On: every site keeps its inputs in their own dtype and computes the rest again in backward, a
    block of rows at a time, so that no copy of all tokens in float32 exists at any moment.

    A switch that is not set is on where the model has such parts. GLM-5.3-Flash has all of them,
    torchtitan's layers, with experts, the combine alone.

    Agreement of on and off, outputs and every gradient ("bits": equal to the bit; "order": within
    the order of summation, that is, the rounding of sums of the same products):

    * ``hyper_connections``: reading the streams bits; mapping, mixing matrix and merge order. In
      bfloat16 the merge's gradients are closer to exact: plain autograd rounds them at every step.
      The kernels of ``model.hyper_connections_kernel`` keep less still, on or off: with them this
      switch changes nothing.
    * ``router``: order; bits in float32, where nothing is upcast, within one block of rows.
    * ``rms_norm``, both norms: bits. Beyond one block of rows (``kernels.row_blocks``) the blocks'
      gradients of a weight are summed in float32.
    * ``expert_combine``: the sum over experts order; for torchtitan's layers, which round weighted
      outputs to the tokens' dtype before they sum them, on a CPU bits. Gradients of the experts'
      outputs bits, of the weights order. It saves nothing where tokens are float32 themselves.
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
        hyper_connections: bool | None = None
        """mHC in plain torch: mapping, mixing matrix, reading and merging keep the streams
        themselves, as its kernels always do (model.hyper_connections_kernel)."""

        router: bool | None = None
        """Router logits keep the tokens themselves, not a float32 copy."""

        rms_norm: bool | None = None
        """RMS norms, KDA's gated one included, keep their inputs alone."""

        expert_combine: bool | None = None
        """The sum over a token's experts keeps their outputs, not float32 products."""

        swiglu: bool | None = None
        """Clamped SwiGLU keeps gate and up, not their clamped copies and the activation."""

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        missing = _missing(recipe)
        for site, why in missing.items():
            if getattr(self.config, site):
                yield Problem(
                    f"{self.path}.{site}",
                    f"true finds nothing to replace: {why}",
                    "use false, or leave it out",
                )
        if len(missing) == len(SITES):
            yield Problem(
                f"{self.path}.enabled",
                "true needs a model with sites to trim; this one has none: "
                + "; ".join(missing.values()),
                "use a glm_flash model, or one with experts, or leave it out",
            )
        elif not self._wanted(recipe):
            there = ", ".join(site for site in SITES if site not in missing)
            yield Problem(
                f"{self.path}.enabled",
                "true with every site off saves nothing",
                f"switch one of {there} on, or leave it out",
            )

    def apply(self, plan: RunPlan) -> None:
        for site in self._wanted(plan.recipe):
            for kind, change in _changes(plan.recipe, site).items():
                plan.swap(f"{self.name}.{site}", kind, change)

    def _wanted(self, recipe: "Recipe") -> list[str]:
        """Sites that are on: by a switch, or because the model has them and no switch is set."""
        missing, switches = _missing(recipe), {site: getattr(self.config, site) for site in SITES}
        return [s for s, on in switches.items() if on or (on is None and s not in missing)]


def _missing(recipe: "Recipe") -> dict[str, str]:
    """Site that there is nothing to replace at -> why."""
    model, of_titan = recipe.model, not isinstance(recipe.model, GlmFlashModel)
    missing = dict(_NOT_IN_TITAN) if of_titan else {}
    if model.n_experts is None:
        missing |= dict.fromkeys(_OF_EXPERTS, "every layer of the model is dense")
    elif of_titan and (why := _sums_elsewhere(recipe)):
        missing["expert_combine"] = why
    return missing


def _sums_elsewhere(recipe: "Recipe") -> str | None:
    """Why outputs of torchtitan's experts are not summed by its standard dispatcher, if not."""
    backend = getattr(recipe.model, "comm_backend", "standard")
    if backend != "standard":
        return f"model.comm_backend {backend!r} sums in kernels of its own"
    for name in ("llep", "pipelined_llep"):
        if getattr(recipe.components, name).enabled:
            return f"components.{name} keeps nothing of the sum as it is"
    return None


def _changes(recipe: "Recipe", site: str) -> dict[type, Callable[[Any], Any]]:
    """Type of parts' configs -> what makes their configs those of trimmed parts."""
    if site == "expert_combine" and not isinstance(recipe.model, GlmFlashModel):
        return {AllToAllTokenDispatcher.Config: keep_outputs}
    return {kind: partial(trimmed, kernels=fs) for kind, fs in SITES[site].items()}
