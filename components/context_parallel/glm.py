"""GLM-5.3-Flash over context ranks: what its mixers exchange, by which method, and how much."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.context_parallel.kda_heads import check_heads
from components.context_parallel.layout import DEGREE
from components.context_parallel.mixers import MIXERS
from components.context_parallel.plan import SplitPlan
from components.context_parallel.refusals import PATH, no_effect, refused
from components.context_parallel.volume import Volume, dsa_volume, kda_volume, usual_exchange
from components.core.problems import Problem
from components.core.sizes import FLOAT32, compute_itemsize, mean_tokens
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.tensor_parallel import part_of_rank

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.plan import RunPlan


@dataclass(frozen=True)
class GlmSplit(SplitPlan):
    """How a GLM-5.3-Flash recipe is split over its context ranks.

    Attributes:
        model: the recipe's; of several tensor ranks, what one computes.
    """

    model: GlmFlashModel

    @staticmethod
    def of(recipe: "Recipe", model: GlmFlashModel) -> "GlmSplit":
        """``model`` is the recipe's."""
        settings, parallel = recipe.components.context_parallel, recipe.parallelism
        model, ranks = part_of_rank(model, recipe), parallel.context_parallel_degree
        asked = {"kda": usual_kda(model, ranks) if settings.kda == "auto" else settings.kda,
                 "dsa": settings.dsa}  # fmt: skip
        present = set[str](model.layer_types)
        return GlmSplit(
            ranks=ranks,
            kind=settings.layout,
            align=alignment(model),
            methods={name: how for name, how in asked.items() if name in present},
            # A mixer is given the tokens of all tensor ranks.
            tokens=mean_tokens(recipe) * parallel.tensor_parallel_degree,
            element_size=compute_itemsize(recipe),
            model=model,
        )

    def layers(self, mixer: str) -> int:
        """See ``SplitPlan``."""
        return sum(name == mixer for name in self.model.layer_types)

    def volume(self, mixer: str) -> Volume:
        """See ``SplitPlan``; of equal shares."""
        model = self.model
        if mixer == "dsa":
            return dsa_volume(
                tokens=self.tokens,
                ranks=self.ranks,
                kv_rank=model.kv_lora_rank,
                index_dim=model.index_head_dim,
                pool=model.index_kpool,
                element_size=self.element_size,
            )
        return kda_volume(
            self.methods[mixer],  # type: ignore[arg-type]
            tokens=self.tokens,
            ranks=self.ranks,
            dim=model.dim,
            heads=model.kda_heads,
            head_dim=model.kda_head_dim,
            element_size=self.element_size,
            kind=self.kind,
        )

    def exchanged(self, mixer: str) -> int:
        """See ``SplitPlan``.

        A gather holds all ranks' rows as they arrived and in the order of the batch; its gradient
        the same in float32, beside what was summed. What a state is passed on with is small; in
        backward gradients of keys, values, gate and beta wait for the second run of a document.
        """
        model, e, whole = self.model, self.element_size, self.tokens * self.ranks
        if mixer == "dsa":
            keys = whole // model.index_kpool * model.index_head_dim * 2 * e
            # The last: plain and dense attention, and what kernels round for themselves.
            return whole * model.kv_lora_rank * (2 * e + 2 * FLOAT32 + FLOAT32) + keys
        width = model.kda_heads * model.kda_head_dim
        match self.methods[mixer]:
            case "hidden":
                low = whole * (model.kda_head_dim + model.kda_heads) * e
                return whole * model.dim * max(3 * e, e + 2 * FLOAT32) + low
            case "projections":
                return 3 * self.tokens * (4 * width + model.kda_heads) * e
        states = 2 * self.ranks * model.kda_heads * model.kda_head_dim**2 * 2 * FLOAT32
        return 2 * states + self.tokens * 5 * width * e

    def install(self, owner: str, plan: "RunPlan") -> None:
        """See ``SplitPlan``."""
        for mixer, method in self.methods.items():
            plan.override(owner, MIXERS[mixer].factory, method=method)


def alignment(model: GlmFlashModel) -> int:
    """Tokens: a part begins at a multiple of it within its first document. Whole pools, and no part
    is shorter than a convolution reaches back."""
    pool, reach = model.index_kpool, model.conv_kernel - 1
    return pool * -(-max(pool, reach) // pool)


def usual_kda(model: GlmFlashModel, ranks: int) -> str:
    """Hidden states for a few ranks that can share the heads, else states."""
    method = usual_exchange(ranks)
    return "state" if method == "hidden" and model.kda_heads % ranks else method


def check_glm(recipe: "Recipe", model: GlmFlashModel) -> Iterator[Problem]:
    """Problems of the mixers with their methods, and with other components."""
    settings = recipe.components.context_parallel
    for name, stock in (("softmax", "auto"), ("inner_ring", None)):
        yield from no_effect(settings, name, stock, "this model has no softmax attention")
    if "kda" not in model.layer_types:
        yield from no_effect(settings, "kda", "auto", "model.layer_types has no kda")
    elif settings.kda in ("hidden", "projections"):
        part, parallel = part_of_rank(model, recipe), recipe.parallelism
        tensor = parallel.tensor_parallel_degree
        yield from refused(
            lambda: check_heads(part.kda_heads, parallel.context_parallel_degree),
            f"or {PATH}.kda=state, which splits no heads"
            + (f"; each of {tensor} tensor ranks has {part.kda_heads}" if tensor > 1 else ""),
        )
    yield from _neighbours(recipe, model)


def _neighbours(recipe: "Recipe", model: GlmFlashModel) -> Iterator[Problem]:
    components = recipe.components
    chunking = components.sublayer_chunking
    for mixer in ("kda", "dsa"):
        if chunking.enabled and getattr(chunking, mixer) and mixer in model.layer_types:
            yield Problem(
                f"components.sublayer_chunking.{mixer}",
                f"true cuts the mixers that {PATH} splits over ranks; one of the two can",
                f"use components.sublayer_chunking.{mixer}=false (its other parts combine)",
            )
    if components.indexer_training.enabled:
        yield Problem(
            "components.indexer_training.enabled",
            f"true beside {PATH}: an indexer's loss needs the attention of whole documents on one "
            "rank",
            f"use one of the two; {DEGREE}=1 and {PATH}.enabled=false trains indexers",
        )
    tensor = recipe.parallelism.tensor_parallel_degree
    if components.indexer_sharding.enabled and tensor == 1:
        yield Problem(
            "components.indexer_sharding.enabled",
            f"true beside {PATH}, which gives every rank queries of its own: their scoring is "
            "shared already",
            "use false",
        )
