"""What a recipe keeps between forward and backward when its layers are recomputed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.core.sizes import hidden_state
from components.offload.arena import aligned
from components.recompute.terms import kept_outputs

if TYPE_CHECKING:
    from components.core.recipe import Recipe


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
    units = []
    for start in range(0, layers, every):
        members = range(start, min(start + every, layers))
        held = tuple(size for layer in members for size in kept_outputs(recipe, layer))
        units.append(Unit(hidden_state(recipe), held, members))
    return units


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
