"""Why a recipe cannot split its batches over context ranks, before anything is started."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from components.context_parallel.families import split_of
from components.context_parallel.glm import check_glm
from components.context_parallel.layout import DEGREE
from components.context_parallel.refusals import PATH, refused
from components.context_parallel.softmax.plan import check_softmax
from components.core.base import Target
from components.core.problems import Problem, divisors, shown
from components.models.glm_flash.settings import GlmFlashModel

if TYPE_CHECKING:
    from components.core.recipe import Recipe


def check_split(recipe: "Recipe", target: Target) -> Iterator[Problem]:
    """Every problem of the component with its recipe."""
    degree = recipe.parallelism.context_parallel_degree
    if degree == 1:
        legal = ", ".join(str(n) for n in divisors(target.ranks) if n > 1)
        yield Problem(
            f"{PATH}.enabled",
            f"true has no effect with {DEGREE} 1, where a rank computes whole batches",
            f"use {f'a degree of {legal}' if legal else 'more ranks'}, or {PATH}.enabled=false",
        )
        return
    found = list(_of_family(recipe))
    yield from found
    if not found:
        tokens = recipe.training.local_batch_size * recipe.training.seq_len
        longer = "or a longer training.seq_len"
        yield from refused(lambda: split_of(recipe).cut((tokens,)), longer)
    yield from _stock_settings(recipe)


def _of_family(recipe: "Recipe") -> Iterator[Problem]:
    if isinstance(recipe.model, GlmFlashModel):
        return check_glm(recipe, recipe.model)
    return check_softmax(recipe)


def _stock_settings(recipe: "Recipe") -> Iterator[Problem]:
    for name, stock in (
        ("context_parallel_load_balancer", "headtail"),
        ("context_parallel_ptrr_mask_key", None),
    ):
        value = getattr(recipe.parallelism, name)
        if value != stock:
            yield Problem(
                f"parallelism.{name}",
                f"{shown(value)} has no effect beside {PATH}",
                f"leave it at {shown(stock)}; {PATH}.layout says how batches are cut",
            )
