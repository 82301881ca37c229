"""Families of models whose sequences ranks can share, and which of them a model is of."""

from typing import TYPE_CHECKING, Any

from components.context_parallel.glm import GlmSplit, alignment
from components.context_parallel.plan import SplitPlan
from components.context_parallel.softmax.plan import SoftmaxSplit
from components.models.glm_flash.settings import GlmFlashModel

if TYPE_CHECKING:
    from components.core.recipe import Recipe


def split_of(recipe: "Recipe") -> SplitPlan:
    """How a recipe, which ``check_split`` finds nothing wrong with, is split."""
    if isinstance(recipe.model, GlmFlashModel):
        return GlmSplit.of(recipe, recipe.model)
    return SoftmaxSplit.of(recipe)


def alignment_of(model: Any) -> int:
    """Tokens: a part begins at a multiple of it within its first document."""
    return alignment(model) if isinstance(model, GlmFlashModel) else 1
