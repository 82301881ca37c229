"""Models whose layers hold one of torchtitan's inner attentions."""

from dataclasses import dataclass
from typing import Literal

from components.models.settings import Finding, KernelChoice, ModelSettings
from components.titan.attention import quick_flex, resolve_attention, sdpa

AttentionChoice = Literal["auto", "flex", "varlen", "sdpa"]
TitanAttention = Literal["flex", "varlen"]


@dataclass(kw_only=True, slots=True)
class TitanAttentionSettings(ModelSettings):
    """A ``model`` section that chooses among torchtitan's attentions and this project's."""

    attention: AttentionChoice = "auto"
    """Inner attention of every layer. "auto": "flex" on CUDA, "sdpa" elsewhere. "varlen" has no CPU
    kernel and no context parallelism."""

    flex_autotune: bool = False
    """Let torch benchmark flex attention's kernels for each new sequence length before the first
    step. Minutes of waiting per length, so for long runs only. Needs attention "auto" or "flex"."""

    @property
    def inner_attention(self) -> TitanAttention:
        """The attention that torchtitan's layers are configured with before kernels are chosen."""
        return "varlen" if self.attention == "varlen" else "flex"

    def choose_kernels(self, device: str, itemsize: int = 2) -> KernelChoice:
        """See ``ModelSettings.choose_kernels``."""
        backend = resolve_attention(self.attention, device)
        because = f" (auto on {device})" if self.attention == "auto" else ""
        notes = (f"attention: {backend}{because}",)
        if backend == "sdpa":
            return KernelChoice(overrides=(sdpa,), notes=notes)
        if backend == "flex" and not self.flex_autotune:
            return KernelChoice(overrides=(quick_flex,), notes=notes)
        return KernelChoice(notes=notes)

    def check(self) -> list[Finding]:
        """See ``ModelSettings.check``."""
        if self.flex_autotune and self.attention not in ("auto", "flex"):
            message = (
                f"true has no effect with model.attention = {self.attention!r}; "
                "legal: false, or model.attention 'auto' or 'flex'"
            )
            return [("model.flex_autotune", message)]
        return []
