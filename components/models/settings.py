"""What every model of the project can be asked, whichever library it comes from."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.protocols.model_spec import ModelSpec

if TYPE_CHECKING:
    from components.core.recipe import Recipe

Finding = tuple[str, str]
"""A dotted configuration key; what is wrong with its value, and which values are legal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """Which implementations a model runs on one device."""

    overrides: tuple[Callable, ...] = ()
    """torchtitan ``@override`` factories. Each swaps the parts of the model that no component
    replaces."""
    notes: tuple[str, ...] = ()
    """Choices made for the user, such as "attention: sdpa (auto on cpu)", to be logged once."""


@dataclass(kw_only=True, slots=True)
class ModelSettings(ABC):
    """The ``model`` section of a recipe.

    Subclasses provide ``vocab_size`` (rows of each vocabulary matrix), ``max_seq_len`` (tokens),
    ``n_layers`` and ``n_experts`` (routed experts per layer, None for a dense model) as fields or
    as properties. Reading them must not fail, whatever ``check`` has to say.
    """

    if TYPE_CHECKING:
        # For type checkers alone: a property here would become the default of a subclass's field.
        @property
        def vocab_size(self) -> int: ...
        @property
        def max_seq_len(self) -> int: ...
        @property
        def n_layers(self) -> int: ...
        @property
        def n_experts(self) -> int | None: ...

    @property
    def hidden_width(self) -> int:
        """Numbers per token that pass from one layer to the next."""
        return self.build_spec().model.dim

    @abstractmethod
    def build_spec(self) -> ModelSpec:
        """Build torchtitan's description of this model. Allocates no parameters.

        The description is the same for every device; ``choose_kernels`` says what to change in it.

        Raises:
            ValueError: ``check`` found problems; the message lists all of them.
        """

    def on_one_rank(self, recipe: "Recipe") -> "ModelSettings":
        """This model with the widths that one of several tensor ranks computes, where kernels ask
        for them."""
        return self

    def choose_kernels(self, device: str, itemsize: int = 2) -> KernelChoice:
        """Decide what computes the parts of this model that have several implementations. Ask it of
        ``on_one_rank``.

        Args:
            device: "cpu" or "cuda".
            itemsize: bytes of a number in the dtype that layers compute in.

        Raises:
            ValueError: what the settings ask for cannot train on this device; the message is
                "dotted key: what is wrong, and what is legal".
        """
        return KernelChoice()

    def check(self) -> list[Finding]:
        """List every problem that can be found without building the model."""
        return []

    def check_run(self, recipe: "Recipe") -> list[Finding]:
        """List every problem between this model and the rest of its recipe."""
        return []

    def layer_saved_bytes(self, recipe: "Recipe", device: str = "cuda") -> list[int] | None:
        """What each layer keeps between forward and backward on one rank, its input included, when
        nothing is recomputed; bytes. None: not known for this model.

        Args:
            recipe: bound; its components decide what the layers keep.
            device: "cpu" or "cuda".
        """
        return None

    def layer_working_set_bytes(self, recipe: "Recipe", device: str = "cuda") -> list[int] | None:
        """What each layer needs on one rank, at most, while it is recomputed and differentiated,
        without its input; bytes. None: not known for this model.

        Args:
            recipe: bound; its components decide what the layers keep.
            device: "cpu" or "cuda".
        """
        return None

    def refuse_problems(self) -> None:
        """Raise one ``ValueError`` that lists everything ``check`` found, if anything."""
        found = self.check()
        if found:
            raise ValueError("\n".join(f"{key}: {message}" for key, message in found))
