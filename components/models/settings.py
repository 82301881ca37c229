"""What every model of the project can be asked, whichever library it comes from."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchtitan.protocols.model_spec import ModelSpec

if TYPE_CHECKING:
    from components.core.recipe import Recipe

Finding = tuple[str, str]
"""A dotted configuration key; what is wrong with its value, and which values are legal."""

AttentionChoice = Literal["auto", "flex", "varlen", "sdpa"]
TitanAttention = Literal["flex", "varlen"]


@dataclass(kw_only=True, slots=True)
class ModelSettings(ABC):
    """The ``model`` section of a recipe.

    Subclasses provide ``vocab_size`` (rows of each vocabulary matrix), ``max_seq_len`` (tokens),
    ``n_layers`` and ``n_experts`` (routed experts per layer, None for a dense model) as fields or
    as properties. Reading them must not fail, whatever ``check`` has to say.
    """

    attention: AttentionChoice = "auto"
    """Inner attention of every layer. "auto": "flex" on CUDA, "sdpa" elsewhere. "varlen" has no CPU
    kernel and no context parallelism."""

    flex_autotune: bool = False
    """Let torch benchmark flex attention's kernels for each new sequence length before the first
    step. Minutes of waiting per length, so for long runs only. Needs attention "auto" or "flex"."""

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

    @abstractmethod
    def build_spec(self, attention: TitanAttention) -> ModelSpec:
        """Build torchtitan's description of this model. Allocates no parameters.

        Args:
            attention: which of torchtitan's inner attentions every layer is configured with.

        Raises:
            ValueError: ``check`` found problems; the message lists all of them.
        """

    def check(self) -> list[Finding]:
        """List every problem that can be found without building the model."""
        if self.flex_autotune and self.attention not in ("auto", "flex"):
            message = (
                f"true has no effect with model.attention = {self.attention!r}; "
                "legal: false, or model.attention 'auto' or 'flex'"
            )
            return [("model.flex_autotune", message)]
        return []

    def check_run(self, recipe: "Recipe") -> list[Finding]:
        """List every problem between this model and the rest of its recipe."""
        return []

    def refuse_problems(self) -> None:
        """Raise one ``ValueError`` that lists everything ``check`` found, if anything."""
        found = self.check()
        if found:
            raise ValueError("\n".join(f"{key}: {message}" for key, message in found))
