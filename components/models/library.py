"""Models of torchtitan's own library, chosen by family and flavor."""

import importlib
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, cast

from torchtitan.models.common import CosSinRoPE, RoPE
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from components.core.problems import did_you_mean, shown
from components.models.position import LibraryPosition, Position, restretch
from components.models.settings import Finding
from components.models.titan_attention import TitanAttention, TitanAttentionSettings

if TYPE_CHECKING:
    from components.core.recipe import Recipe

TitanFamily = Literal["deepseek_v3", "gpt_oss", "llama3", "qwen3"]

# Where each package keeps its flavors. torchtitan's other packages carry vision or image parts.
_FLAVOR_TABLES: dict[str, str] = {
    "deepseek_v3": "deepseekv3_configs",
    "gpt_oss": "gptoss_configs",
    "llama3": "llama3_configs",
    "qwen3": "qwen3_configs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    vocab_size: int
    max_seq_len: int
    n_layers: int
    n_experts: int | None


_SCALINGS = ("library", "none", "linear", "ntk", "yarn")

# Stands for a model that does not exist: nothing is too much for it, so that the one complaint
# about it is that of ``TitanModel.check``.
_NO_MODEL = _Shape(
    vocab_size=sys.maxsize, max_seq_len=sys.maxsize, n_layers=sys.maxsize, n_experts=None
)


def flavors(family: TitanFamily) -> list[str]:
    """Name the flavors that torchtitan defines for ``family``.

    Raises:
        KeyError: ``family`` is none of ``TitanFamily``.
    """
    package = importlib.import_module(f"torchtitan.models.{family}")
    return list(getattr(package, _FLAVOR_TABLES[family]))


@dataclass(kw_only=True, slots=True)
class TitanModel(TitanAttentionSettings):
    """A text decoder as torchtitan's library defines it, Hugging Face adapter included."""

    family: TitanFamily
    """torchtitan's model package."""

    flavor: str
    """Size within the family, as torchtitan names it: "20b", "8B", "debugmodel", ..."""

    rope_theta: float | None = None
    """Base of the rotary embedding's wavelengths; null: the published one."""

    position: Position = field(default_factory=LibraryPosition)
    """How the rotary embedding stretches to longer contexts: of gpt-oss, whose table the layers
    share; elsewhere it is the published one."""

    @property
    def vocab_size(self) -> int:
        """Rows of each vocabulary matrix."""
        return self._shape().vocab_size

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that the model's rotary embedding is defined for, in tokens."""
        return self.position.longest or self._shape().max_seq_len

    @property
    def n_layers(self) -> int:
        """Decoder layers."""
        return self._shape().n_layers

    @property
    def n_experts(self) -> int | None:
        """Routed experts in each layer that has any; None for a dense model."""
        return self._shape().n_experts

    def build_spec(self) -> ModelSpec:
        """See ``ModelSettings.build_spec``."""
        self.refuse_problems()
        spec = _spec(self.family, self.flavor, self.inner_attention)
        for layer in cast(Decoder.Config, spec.model).layers:
            layer.attention.rope = self._rope(layer.attention.rope)
        return spec

    def _rope(self, published: RoPE.Config) -> RoPE.Config:
        if self.rope_theta is not None:
            published = replace(published, theta=self.rope_theta)
        if self.family != "gpt_oss":
            return published
        return restretch(self.position, cast(CosSinRoPE.Config, published))

    def check(self) -> list[Finding]:
        """See ``ModelSettings.check``."""
        found = TitanAttentionSettings.check(self)
        if self.family not in _FLAVOR_TABLES:
            message = f"{self.family!r} is no decoder family of torchtitan; "
            found.append(("model.family", message + _choices(self.family, _FLAVOR_TABLES)))
            return found
        known = flavors(self.family)
        if self.flavor not in known:
            message = f"{self.flavor!r} is no flavor of {self.family}; "
            found.append(("model.flavor", message + _choices(self.flavor, known)))
        return found + self._check_position()

    def _check_position(self) -> list[Finding]:
        position, found = self.position, []
        if self.rope_theta is not None and not 0 < self.rope_theta < math.inf:
            message = f"{self.rope_theta} is not positive; legal: above 0, or null"
            found.append(("model.rope_theta", message))
        if position.kind != "rope":
            message = (
                f"{position.kind!r}: torchtitan's decoders are published with rotary embeddings; "
                "legal: 'rope' (the others: components.models.moe.MoEModel)"
            )
            return [*found, ("model.position.kind", message)]
        if self.family != "gpt_oss":
            return [*found, *self._published_alone()]
        if position.scaling not in _SCALINGS:
            legal = ", ".join(map(repr, _SCALINGS))
            message = f"{position.scaling!r} is not offered for gpt_oss; legal: {legal}"
            return [*found, ("model.position.scaling", message)]
        if position.mscale != 1.0 and position.scaling == "yarn":
            message = f"{position.mscale}: gpt-oss's attention has its own temperature; legal: 1"
            found.append(("model.position.mscale", message))
        return found + position.check()

    def _published_alone(self) -> Iterator[Finding]:
        published = LibraryPosition()
        for key in fields(published):
            value, legal = getattr(self.position, key.name), getattr(published, key.name)
            if value != legal:
                message = f"{shown(value)} is not offered for {self.family}; legal: {shown(legal)}"
                yield f"model.position.{key.name}", message
                return

    def check_run(self, recipe: "Recipe") -> list[Finding]:
        """See ``ModelSettings.check_run``."""
        found = self.position.check_length(recipe.training.seq_len)
        return [*found, *_experts_with_biases(recipe)] if self.family == "gpt_oss" else found

    def _shape(self) -> _Shape:
        known = self.family in _FLAVOR_TABLES and self.flavor in flavors(self.family)
        return _shape_of(self.family, self.flavor) if known else _NO_MODEL


def _spec(family: TitanFamily, flavor: str, attention: TitanAttention) -> ModelSpec:
    package = importlib.import_module(f"torchtitan.models.{family}")
    return package.model_registry(flavor, attn_backend=attention)


@cache
def _shape_of(family: TitanFamily, flavor: str) -> _Shape:
    decoder = cast(Decoder.Config, _spec(family, flavor, "flex").model)
    moes = [layer.moe for layer in decoder.layers if layer.moe is not None]
    return _Shape(
        vocab_size=decoder.vocab_size,
        max_seq_len=decoder.max_seq_len,
        n_layers=len(decoder.layers),
        n_experts=moes[0].num_experts if moes else None,
    )


def _choices(value: str, options: Iterable[str]) -> str:
    names = list(options)
    legal = f"legal: {', '.join(names)}"
    return " ".join(filter(None, (did_you_mean(value, names), legal)))


def _experts_with_biases(recipe: "Recipe") -> Iterator[Finding]:
    """What torchtitan's gpt-oss experts do wrong without a word, or fail at."""
    if recipe.training.mixed_precision_param == "float32":
        message = (
            "'float32' fails in torchtitan's gpt-oss experts, which always return bfloat16; "
            "use bfloat16"
        )
        yield "training.mixed_precision_param", message
    parallel = recipe.parallelism
    tensor = parallel.tensor_parallel_degree
    if tensor > 1 and parallel.expert_parallel_degree == 1:
        # They look for the degree on a DTensor's mesh, and FSDP2 hands them plain tensors.
        message = (
            f"{tensor} with parallelism.expert_parallel_degree 1: torchtitan's gpt-oss experts "
            "then add their second bias once on every tensor rank; legal: 1, or an "
            "expert_parallel_degree of 2 or more, which spreads whole experts"
        )
        yield "parallelism.tensor_parallel_degree", message
