"""What a recipe asks of context parallelism, made definite: the cut, the methods, the sizes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.context_parallel.layout import Kind, Layout, cut_batch
from components.context_parallel.volume import Volume, dsa_volume, kda_volume, usual_exchange
from components.core.sizes import FLOAT32, compute_itemsize, mean_tokens
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.tensor_parallel import part_of_rank

if TYPE_CHECKING:
    from components.core.recipe import Recipe


@dataclass(frozen=True)
class SplitPlan:
    """How a GLM-5.3-Flash recipe is split over its context ranks.

    Attributes:
        model: the recipe's; of several tensor ranks, what one computes.
        ranks: C.
        kind: how a batch is cut.
        methods: of each mixer that the model has.
        tokens: of one rank, on average.
        element_size: bytes of an activation.
    """

    model: GlmFlashModel
    ranks: int
    kind: Kind
    methods: dict[str, str]
    tokens: int
    element_size: int

    @staticmethod
    def of(recipe: "Recipe") -> "SplitPlan":
        """``recipe`` is one of a GLM-5.3-Flash model."""
        model, settings = recipe.model, recipe.components.context_parallel
        assert isinstance(model, GlmFlashModel)
        model, parallel = part_of_rank(model, recipe), recipe.parallelism
        # A mixer is given the tokens of all tensor ranks.
        tokens = mean_tokens(recipe) * parallel.tensor_parallel_degree
        ranks = parallel.context_parallel_degree
        asked = {"kda": usual_kda(model, ranks) if settings.kda == "auto" else settings.kda,
                 "dsa": settings.dsa}  # fmt: skip
        present = set[str](model.layer_types)
        methods = {name: how for name, how in asked.items() if name in present}
        return SplitPlan(model, ranks, settings.layout, methods, tokens, compute_itemsize(recipe))

    def cut(self, lengths: tuple[int, ...]) -> Layout:
        """See ``cut_batch``."""
        return cut_batch(lengths, self.ranks, self.kind, alignment(self.model))

    def layers(self, mixer: str) -> int:
        """Layers with a mixer."""
        return sum(name == mixer for name in self.model.layer_types)

    def volume(self, mixer: str) -> Volume:
        """Bytes that one rank sends for one layer and pass."""
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
        """Bytes on one rank, at most, of what a layer exchanges beyond what it holds by itself.

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


def alignment(model: GlmFlashModel) -> int:
    """Tokens: a part begins at a multiple of it within its first document. Whole pools, and no part
    is shorter than a convolution reaches back."""
    pool, reach = model.index_kpool, model.conv_kernel - 1
    return pool * -(-max(pool, reach) // pool)


def usual_kda(model: GlmFlashModel, ranks: int) -> str:
    """Hidden states for a few ranks that can share the heads, else states."""
    method = usual_exchange(ranks)
    return "state" if method == "hidden" and model.kda_heads % ranks else method
