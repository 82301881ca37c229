"""What components that change the indexer ask of a model."""

from typing import Any, TypeGuard

from components.core.problems import Problem
from components.models.glm_flash.settings import GlmFlashModel


def has_indexer(model: Any) -> TypeGuard[GlmFlashModel]:
    """Whether a recipe's model has sparse attention, whose indexer chooses pools."""
    return isinstance(model, GlmFlashModel) and "dsa" in model.layer_types


def no_indexer(path: str) -> Problem:
    """What to say of a component, by its dotted key, where the model has none."""
    return Problem(
        f"{path}.enabled",
        "true needs a model with sparse attention; this one has no indexer",
        "use model=glm_flash, glm_flash_4layer or glm_flash_tiny, put a dsa layer into "
        "model.layer_types, or leave it out",
    )
