"""What a recipe keeps between forward and backward when its layers are recomputed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.core.sizes import compute_itemsize, local_tokens
from components.models.glm_flash.settings import GlmFlashModel
from components.offload.arena import aligned

if TYPE_CHECKING:
    from components.core.recipe import Recipe

_FLOAT32 = 4


@dataclass(frozen=True)
class Unit:
    """A boundary, and what its layers keep until backward has passed them.

    Attributes:
        boundary: bytes of the input of the unit's first layer, on one rank.
        held: bytes of each kept output of its sub-layers.
        layers: numbers of its layers.
    """

    boundary: int
    held: tuple[int, ...]
    layers: range

    @property
    def nbytes(self) -> int:
        """Bytes that the unit takes on the host."""
        return aligned(self.boundary) + sum(map(aligned, self.held))


def units_of(recipe: "Recipe") -> list[Unit]:
    """The units of one micro-batch on one rank, in forward order.

    Args:
        recipe: checked, with ``components.layer_recompute`` on, without pipeline parallelism.
    """
    every, layers = recipe.components.layer_recompute.every, recipe.model.n_layers
    one = local_tokens(recipe) * compute_itemsize(recipe)
    units = []
    for start in range(0, layers, every):
        members = range(start, min(start + every, layers))
        outputs = sum(_kept_outputs(recipe, layer) for layer in members)
        held = (one * _output_width(recipe),) * outputs
        units.append(Unit(one * recipe.model.hidden_width, held, members))
    return units


def _output_width(recipe: "Recipe") -> int:
    model = recipe.model
    return model.dim if isinstance(model, GlmFlashModel) else recipe.model.hidden_width


def _kept_outputs(recipe: "Recipe", layer: int) -> int:
    """How many outputs of a layer's parts are kept for its recomputation."""
    model = recipe.model
    if not isinstance(model, GlmFlashModel):
        return 0
    chunking = recipe.components.sublayer_chunking
    mixer, dense = model.layer_types[layer], layer < model.n_dense_layers
    shared = chunking.enabled and chunking.shared_expert and not dense
    if recipe.components.layer_recompute.keep_sublayers:
        # A chunked part's kept output is the sub-layer's, except for the shared expert's.
        return 2 + shared
    if not chunking.enabled:
        return 0
    cut = chunking.kda if mixer == "kda" else chunking.dsa
    return cut + (chunking.feed_forward and dense) + shared


def working_sets(recipe: "Recipe", units: list[Unit], device: str) -> list[int] | None:
    """Bytes that each unit's recomputation and backward hold on the device, at most, besides the
    boundaries; None where the model does not say.

    Args:
        units: ``units_of(recipe)``.
        device: "cpu" or "cuda".
    """
    of_layer = recipe.model.layer_working_set_bytes(recipe, device)
    if of_layer is None:
        return None
    # While a unit's last layer runs, the inputs of all its layers have been rebuilt.
    return [
        max(of_layer[layer] + place * unit.boundary for place, layer in enumerate(unit.layers))
        for unit in units
    ]


def loss_working_set(recipe: "Recipe") -> int:
    """Bytes of the logits that exist at one time on one rank: in the compute dtype, in float32,
    and their gradient in float32."""
    chunked = recipe.components.chunked_loss
    tokens = local_tokens(recipe) // (chunked.num_chunks if chunked.enabled else 1)
    width = compute_itemsize(recipe) + 2 * _FLOAT32
    return tokens * recipe.model.vocab_size * width
