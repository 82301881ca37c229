"""What a ``GlmFlashModel`` is on one of several tensor ranks, and what they cannot share."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from components.core.problems import divisors
from components.models.settings import Finding

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.models.glm_flash.settings import GlmFlashModel

_KEY = "parallelism.tensor_parallel_degree"

# A row of an expert's matrix begins at a multiple of 16 bytes, for grouped products.
_EXPERT_ROW = 8


def part_of_rank(model: "GlmFlashModel", recipe: "Recipe") -> "GlmFlashModel":
    """The model whose mixers and SwiGLUs are those that one rank computes, for all tokens.

    Routed experts are narrower only without expert parallelism, which spreads them instead.
    """
    parallel = recipe.parallelism
    degree = parallel.tensor_parallel_degree
    if degree == 1:
        return model
    widths = {
        name: getattr(model, name) // degree
        for name in ("kda_heads", "n_heads", "dense_hidden_dim")
    }
    if parallel.expert_parallel_degree == 1:
        widths["expert_hidden_dim"] = max(model.expert_hidden_dim // degree, 1)
    return replace(model, **widths)


def check_tensor_parallel(model: "GlmFlashModel", recipe: "Recipe") -> list[Finding]:
    """List every problem of splitting the model over tensor ranks."""
    parallel = recipe.parallelism
    degree = parallel.tensor_parallel_degree
    if degree <= 1:
        return []
    return [*_widths(model, recipe, degree), *_neighbours(recipe, degree)]


def _widths(model: "GlmFlashModel", recipe: "Recipe", degree: int) -> Iterator[Finding]:
    shared = dict(_shared_widths(model, recipe))
    uneven = {name: (value, unit) for name, (value, unit) in shared.items()
              if value % (degree * unit)}  # fmt: skip
    if not uneven:
        return
    legal = [
        n for n in divisors(model.kda_heads)
        if all(value % (n * unit) == 0 for value, unit in shared.values())
    ]  # fmt: skip
    parts = [
        f"{name} = {value}" + (f" into multiples of {unit}" if unit > 1 else "")
        for name, (value, unit) in uneven.items()
    ]
    yield (
        _KEY,
        f"{degree} does not divide {' and '.join(parts)}; legal: {', '.join(map(str, legal))}",
    )


def _shared_widths(
    model: "GlmFlashModel", recipe: "Recipe"
) -> Iterator[tuple[str, tuple[int, int]]]:
    """What ranks take equal parts of, by name, and what every part is a multiple of."""
    if "kda" in model.layer_types:
        yield "model.kda_heads", (model.kda_heads, 1)
    if "dsa" in model.layer_types:
        yield "model.n_heads", (model.n_heads, 1)
    yield "model.vocab_size", (model.vocab_size, 1)
    if model.n_dense_layers:
        yield "model.dense_hidden_dim", (model.dense_hidden_dim, 1)
    if model.n_experts is None:
        return
    if recipe.parallelism.expert_parallel_degree == 1:
        yield "model.expert_hidden_dim", (model.expert_hidden_dim, _EXPERT_ROW)
    elif model.n_shared_experts:
        yield "model.expert_hidden_dim", (model.expert_hidden_dim, 1)


def _neighbours(recipe: "Recipe", degree: int) -> Iterator[Finding]:
    if not recipe.parallelism.enable_sequence_parallel:
        yield (
            "parallelism.enable_sequence_parallel",
            f"false with {_KEY} {degree}: tensor ranks hold a part of the tokens each between the "
            f"mixers; legal: true, or {_KEY} 1",
        )
    if recipe.components.indexer_training.enabled:
        yield (
            "components.indexer_training.enabled",
            f"true with {_KEY} {degree}: an indexer's loss needs the attention of all heads on one "
            f"rank; legal: false, or {_KEY} 1",
        )
