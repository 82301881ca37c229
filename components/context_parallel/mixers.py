"""Which mixers of GLM-5.3-Flash ranks can share a batch in, and by which methods.

A method takes the model's own module, this rank's tokens and the share that they are, and returns
this rank's outputs. What softmax attention has is in ``softmax``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torchtitan.config import derive, override

from components.context_parallel.dsa import dsa_gathered
from components.context_parallel.kda_heads import kda_hidden, kda_projections
from components.context_parallel.kda_state import kda_state
from components.context_parallel.share import Share
from components.models.glm_flash.kda import KDA
from components.models.glm_flash.mla import SparseMLA

Method = Callable[[Any, torch.Tensor, Share], torch.Tensor]

KDA_METHODS: Mapping[str, Method] = MappingProxyType(
    {"hidden": kda_hidden, "projections": kda_projections, "state": kda_state}
)
DSA_METHODS: Mapping[str, Method] = MappingProxyType({"gathered": dsa_gathered})


class SplitKDA(KDA):
    """``KDA`` on this rank's share of a batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(KDA.Config):
        method: str
        """A key of ``KDA_METHODS``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.method = KDA_METHODS[config.method]

    def forward(self, x: torch.Tensor, documents: Any) -> torch.Tensor:
        """(1, n, D) -> (1, n, D), ``documents`` being a ``Share`` of n tokens."""
        return self.method(self, x.flatten(0, 1), documents).view_as(x)


class SplitSparseMLA(SparseMLA):
    """``SparseMLA`` on this rank's share of a batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(SparseMLA.Config):
        method: str
        """A key of ``DSA_METHODS``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.method = DSA_METHODS[config.method]

    def forward(self, x: torch.Tensor, documents: Any) -> torch.Tensor:
        """(1, n, D) -> (1, n, D), ``documents`` being a ``Share`` of n tokens."""
        return self.method(self, x.flatten(0, 1), documents).view_as(x)


@override(target=KDA.Config, description="KDA on a share of the batch")
def split_kda(cfg: KDA.Config, *, method: str) -> SplitKDA.Config:
    return derive(cfg, SplitKDA.Config, method=method)


@override(target=SparseMLA.Config, description="sparse attention on a share of the batch")
def split_dsa(cfg: SparseMLA.Config, *, method: str) -> SplitSparseMLA.Config:
    return derive(cfg, SplitSparseMLA.Config, method=method)


@dataclass(frozen=True)
class Mixer:
    """A kind of mixer.

    Attributes:
        factory: torchtitan override that puts modules which run a method, by its name, in place of
            a model's own.
        methods: by name; all exact for packed documents.
    """

    factory: Callable[..., Any]
    methods: Mapping[str, Method]


MIXERS: Mapping[str, Mixer] = MappingProxyType(
    {"kda": Mixer(split_kda, KDA_METHODS), "dsa": Mixer(split_dsa, DSA_METHODS)}
)
"""By the name of their setting under ``components.context_parallel``, with which the names of their
counted bytes begin as well."""
