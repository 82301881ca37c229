"""Models of torchtitan's own library, chosen by family and flavor."""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from components.core.problems import did_you_mean
from components.models.settings import Finding, ModelSettings, TitanAttention

TitanFamily = Literal["deepseek_v3", "gpt_oss", "llama3", "qwen3"]

# Where each package keeps its flavors. torchtitan's other packages carry vision or image parts.
_FLAVOR_TABLES: dict[str, str] = {
    "deepseek_v3": "deepseekv3_configs",
    "gpt_oss": "gptoss_configs",
    "llama3": "llama3_configs",
    "qwen3": "qwen3_configs",
}


def flavors(family: TitanFamily) -> list[str]:
    """Name the flavors that torchtitan defines for ``family``.

    Raises:
        KeyError: ``family`` is none of ``TitanFamily``.
    """
    package = importlib.import_module(f"torchtitan.models.{family}")
    return list(getattr(package, _FLAVOR_TABLES[family]))


@dataclass(kw_only=True, slots=True)
class TitanModel(ModelSettings):
    """A text decoder exactly as torchtitan's library defines it, Hugging Face adapter included."""

    family: TitanFamily
    """torchtitan's model package."""

    flavor: str
    """Size within the family, as torchtitan names it: "20b", "8B", "debugmodel", ..."""

    @property
    def vocab_size(self) -> int:
        """Rows of each vocabulary matrix."""
        return self._decoder().vocab_size

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that the model's rotary embedding is defined for, in tokens."""
        return self._decoder().max_seq_len

    @property
    def n_layers(self) -> int:
        """Decoder layers."""
        return len(self._decoder().layers)

    def build_spec(self, attention: TitanAttention) -> ModelSpec:
        """See ``ModelSettings.build_spec``."""
        self.refuse_problems()
        package = importlib.import_module(f"torchtitan.models.{self.family}")
        return package.model_registry(self.flavor, attn_backend=attention)

    def check(self) -> list[Finding]:
        """See ``ModelSettings.check``."""
        found = ModelSettings.check(self)
        if self.family not in _FLAVOR_TABLES:
            message = f"{self.family!r} is no decoder family of torchtitan; "
            found.append(("model.family", message + _choices(self.family, _FLAVOR_TABLES)))
            return found
        known = flavors(self.family)
        if self.flavor not in known:
            message = f"{self.flavor!r} is no flavor of {self.family}; "
            found.append(("model.flavor", message + _choices(self.flavor, known)))
        return found

    def _decoder(self) -> Decoder.Config:
        return cast(Decoder.Config, self.build_spec("flex").model)


def _choices(value: str, options: Iterable[str]) -> str:
    names = list(options)
    legal = f"legal: {', '.join(names)}"
    return " ".join(filter(None, (did_you_mean(value, names), legal)))
