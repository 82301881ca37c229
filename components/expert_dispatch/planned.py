"""What the components that plan experts' rows have in common."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter

from components.core.base import Component, MemoryTerm, Target
from components.core.modules import modules_of
from components.core.problems import Problem
from components.core.sizes import FLOAT32, compute_itemsize
from components.expert_dispatch.balanced_experts import BalancedRoutedExperts
from components.expert_dispatch.cut import cut_of
from components.expert_dispatch.layer_plan import PlanRule
from components.expert_dispatch.load_record import HEADLINES, SCALARS, LoadRecord
from components.expert_dispatch.partition import WHOLE, ChunkRule
from components.expert_dispatch.sizes import expert_parameters, kept_bytes, routed_tokens
from components.titan.experts import parts_of

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.trainer import RecipeTrainer

_MATRICES = 3
"""Of an expert, all of one size."""


class PlannedExperts(Component):
    """Routed experts whose rows a plan spreads over the ranks of their group.

    Subclasses say how tokens are cut, and apply themselves.
    """

    relieves = "activations"
    scalars = SCALARS
    headlines = HEADLINES

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        capacity_factor: float = 1.0
        """Rows that a rank computes at most, as a multiple of the mean, 1 or more. Higher: fewer
        weights are copied, and ranks wait for the fullest."""

        minimum_rows: int = 1024
        """Rows of an expert that are worth copying its weights for, 1 or more; fewer are handed on
        only where nothing else brings a rank below its capacity."""

        threshold: float = 1.3
        """Rows of the fullest rank over the mean below which a layer is left as it is, 1 or more.
        1: every layer is planned, however even."""

        def __post_init__(self) -> None:
            self.plan_rule()

        def plan_rule(self) -> PlanRule:
            """How rows are spread."""
            return PlanRule(
                capacity_factor=self.capacity_factor,
                minimum_rows=self.minimum_rows,
                threshold=self.threshold,
            )

        def rule(self) -> ChunkRule:
            """How tokens are cut."""
            return WHOLE

        def sums_are_float32(self) -> bool:
            """Whether gradients of parameters are summed over chunks, and not rounded between."""
            return False

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._experts: list[BalancedRoutedExperts] = []
        self._record = LoadRecord()

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        if recipe.model.n_experts is None:
            yield Problem(
                f"{self.path}.enabled",
                "true finds no routed experts: every layer of the model is dense",
                f"use a model with experts, or {self.path}.enabled=false",
            )
            return
        if recipe.parallelism.expert_parallel_degree == 1:
            yield Problem(
                f"{self.path}.enabled",
                "true has nothing to even out with parallelism.expert_parallel_degree 1, where "
                "every rank computes the rows of its own tokens",
                "use parallelism.expert_parallel_degree 2 or more, "
                f"components.sequence_chunked_moe, or {self.path}.enabled=false",
            )
        yield from self._check_exchange(recipe)
        yield from self._check_kind(recipe)

    def _check_exchange(self, recipe: "Recipe") -> Iterator[Problem]:
        backend = getattr(recipe.model, "comm_backend", "standard")
        if backend != "standard":
            yield Problem(
                f"{self.path}.enabled",
                f"true cannot be combined with model.comm_backend {backend!r}, which sends every "
                "row to the rank where its expert lives",
                f"use model.comm_backend=standard, or {self.path}.enabled=false",
            )
        if recipe.compile.enable and "model" in recipe.compile.components:
            yield Problem(
                "compile.components",
                f"[{', '.join(recipe.compile.components)}] compiles layers, and {self.path} plans "
                "on the host what each of them sends, and runs experts again in backward",
                f"use [loss], compile.enable=false, or {self.path}.enabled=false",
            )

    def _check_kind(self, recipe: "Recipe") -> Iterator[Problem]:
        found = recipe.model.build_spec().model.traverse(GroupedExperts.Config)
        kinds = {type(config): config for _, config, *_ in found}
        for config in kinds.values():
            try:
                with torch.device("meta"):
                    parts_of(config.build())
            except ValueError as error:
                yield Problem(
                    f"{self.path}.enabled",
                    f"true cannot run this model: {error}",
                    f"use components.sequence_chunked_moe, or {self.path}.enabled=false",
                )

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """Outputs that recomputed layers take, weights of experts that a rank helps with, the sums
        of gradients, and rows of experts where the model's working set does not hold them.

        A rank is taken to help with as many experts as it has. Between two ranks it cannot be more;
        among many nothing forbids it. Of 4,000 plans for random loads, from nearly even to one rank
        with four times the others', 24 asked a rank for more, at most 1.5 times as many, all of 384
        experts on 64 ranks; on fewer ranks 0.9 was the most.
        """
        weights = expert_parameters(recipe)
        size = FLOAT32 if self.config.sums_are_float32() else compute_itemsize(recipe)
        # Two rounds of gradients on their way home, of a matrix each; no rank both lends and helps.
        sums = 2 * weights * size + 2 * FLOAT32 * (weights // _MATRICES)
        found = [
            MemoryTerm("outputs of routed experts, kept for recomputed layers", kept_bytes(recipe)),
            MemoryTerm(
                "weights of experts that a rank helps with, in one layer",
                weights * compute_itemsize(recipe),
                note="as many as live there",
            ),
            MemoryTerm(
                "sums of one layer's expert gradients, in its backward",
                sums,
                note="of both",
            ),
        ]
        if recipe.model.layer_working_set_bytes(recipe, target.device) is None:
            found.append(
                MemoryTerm(
                    "rows of experts, in one layer's backward", row_bytes(recipe), note="about"
                )
            )
        return [term for term in found if term.nbytes]

    def on_built(self, trainer: "RecipeTrainer") -> None:
        self._experts = modules_of(trainer.model_parts, BalancedRoutedExperts)

    def before_step(self, trainer: "RecipeTrainer") -> None:
        self._record = LoadRecord()

    def after_microbatch(self, trainer: "RecipeTrainer") -> None:
        self._record.add(experts.latest for experts in self._experts)

    def metrics(self, trainer: "RecipeTrainer") -> dict[str, float]:
        return self._record.scalars(trainer.host_group)


def row_bytes(recipe: "Recipe") -> int:
    """Bytes of the rows of one chunk of one layer's experts while it runs backward.

    Each rank receives its share of a chunk's rows, 1 / ranks of what Eq. 1 of arXiv 2609.14306
    bounds, or as much more as the plan lets it. A row is there as a token and as the gradient of
    its output, as they arrived and as they are sorted; as the gradient of the token, once computed
    and one and a half times on its way home; and three times as wide as an expert is inside. A
    chunk on its way adds a token and a gradient.
    """
    cut, decoder = cut_of(recipe), recipe.model.build_spec().model
    assert cut is not None
    top_k = max(router.top_k for _, router, *_ in decoder.traverse(TokenChoiceTopKRouter.Config))
    inner = max(experts.hidden_dim for _, experts, *_ in decoder.traverse(GroupedExperts.Config))
    rows = top_k * cut.computed_tokens(routed_tokens(recipe))
    width = (7 + 2 * cut.ahead) * recipe.model.hidden_width + 3 * inner
    return rows * width * compute_itemsize(recipe)


def kept_product_bytes(recipe: "Recipe", chunks: int) -> int:
    """Bytes that all layers keep of the gate and up projections of so many chunks each."""
    cut, decoder = cut_of(recipe), recipe.model.build_spec().model
    assert cut is not None
    tokens = routed_tokens(recipe)
    chunks = min(chunks, cut.rule.cut(tokens).chunks)
    rows = cut.computed_tokens(tokens) * chunks
    widths = [
        layer.router.top_k * layer.routed_experts.inner_experts.hidden_dim
        for _, layer, *_ in decoder.traverse(MoE.Config)
    ]
    return 2 * rows * sum(widths) * compute_itemsize(recipe)
