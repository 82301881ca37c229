"""Why a recipe cannot split its batches over context ranks, before anything is started."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from components.context_parallel.kda_heads import check_heads
from components.context_parallel.layout import DEGREE
from components.context_parallel.mixers import MIXERS
from components.context_parallel.plan import SplitPlan
from components.core.base import Target
from components.core.problems import Problem, divisors, shown
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.tensor_parallel import part_of_rank

if TYPE_CHECKING:
    from components.core.recipe import Recipe

_PATH = "components.context_parallel"


def check_split(recipe: "Recipe", target: Target) -> Iterator[Problem]:
    """Every problem of the component with its recipe."""
    if not isinstance(recipe.model, GlmFlashModel):
        yield Problem(
            f"{_PATH}.enabled",
            f"true needs a model whose mixers have a method ({', '.join(MIXERS)}); this one's "
            f"attention is torchtitan's, which {DEGREE} splits by itself",
            f"use a glm_flash model, or {_PATH}.enabled=false",
        )
        return
    degree = recipe.parallelism.context_parallel_degree
    if degree == 1:
        legal = ", ".join(str(n) for n in divisors(target.ranks) if n > 1)
        yield Problem(
            f"{_PATH}.enabled",
            f"true has no effect with {DEGREE} 1, where a rank computes whole batches",
            f"use {f'a degree of {legal}' if legal else 'more ranks'}, or {_PATH}.enabled=false",
        )
        return
    yield from _methods(recipe, recipe.model, degree)
    yield from _neighbours(recipe, recipe.model)


def _methods(recipe: "Recipe", model: GlmFlashModel, degree: int) -> Iterator[Problem]:
    settings = recipe.components.context_parallel
    if "kda" not in model.layer_types and settings.kda != "auto":
        yield Problem(
            f"{_PATH}.kda",
            f"{settings.kda!r} has no effect: model.layer_types has no kda",
            "use auto",
        )
    elif settings.kda in ("hidden", "projections"):
        part, tensor = part_of_rank(model, recipe), recipe.parallelism.tensor_parallel_degree
        yield from _refused(
            lambda: check_heads(part.kda_heads, degree),
            f"or {_PATH}.kda=state, which splits no heads"
            + (f"; each of {tensor} tensor ranks has {part.kda_heads}" if tensor > 1 else ""),
        )
    tokens = recipe.training.local_batch_size * recipe.training.seq_len
    yield from _refused(lambda: SplitPlan.of(recipe).cut((tokens,)), "or a longer training.seq_len")


def _refused(check: Callable[[], object], hint: str) -> Iterator[Problem]:
    """The error of a check, which begins with the key at fault, as a problem."""
    try:
        check()
    except ValueError as error:
        key, _, message = str(error).partition(": ")
        yield Problem(key, message, hint)


def _neighbours(recipe: "Recipe", model: GlmFlashModel) -> Iterator[Problem]:
    components, parallel = recipe.components, recipe.parallelism
    chunking = components.sublayer_chunking
    for mixer in ("kda", "dsa"):
        if chunking.enabled and getattr(chunking, mixer) and mixer in model.layer_types:
            yield Problem(
                f"components.sublayer_chunking.{mixer}",
                f"true cuts the mixers that {_PATH} splits over ranks; one of the two can",
                f"use components.sublayer_chunking.{mixer}=false (its other parts combine)",
            )
    if components.indexer_training.enabled:
        yield Problem(
            "components.indexer_training.enabled",
            f"true beside {_PATH}: an indexer's loss needs the attention of whole documents on one "
            "rank",
            f"use one of the two; {DEGREE}=1 and {_PATH}.enabled=false trains indexers",
        )
    if components.indexer_sharding.enabled and parallel.tensor_parallel_degree == 1:
        yield Problem(
            "components.indexer_sharding.enabled",
            f"true beside {_PATH}, which gives every rank queries of its own: their scoring is "
            "shared already",
            "use false",
        )
    for name, stock in (
        ("context_parallel_load_balancer", "headtail"),
        ("context_parallel_ptrr_mask_key", None),
    ):
        if getattr(parallel, name) != stock:
            yield Problem(
                f"parallelism.{name}",
                f"{shown(getattr(parallel, name))} has no effect beside {_PATH}",
                f"leave it at {shown(stock)}; {_PATH}.layout says how batches are cut",
            )
