"""mHC: n residual streams, mixed by small matrices that every token computes for itself.

Source: "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, equations 7-9; constants
and rounding as in transformers' ``glm5_next``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn as nn
from torchtitan.protocols.module import Module

from kernels.hyper_connections.mapping import project_reference
from kernels.hyper_connections.merge import MadeOf, merge_reference
from kernels.hyper_connections.read import read_reference
from kernels.hyper_connections.sinkhorn import sinkhorn_reference

Kernel = Callable[..., torch.Tensor]


class MixAffine(Module):
    """Scale and shift of the mixing logits; float32 in storage and arithmetic.

    A module of its own, so that sharding can keep it out of the bfloat16 cast.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        streams: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        n = config.streams
        self.sizes = [n, n, n * n]
        self.base = nn.Parameter(torch.empty(n * (n + 2), dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """(..., n^2 + 2n) float32: pre (n), post (n) and the mixing matrix (n x n, row-major)."""
        return z * self.factor() + self.base

    def factor(self) -> torch.Tensor:
        """(n^2 + 2n,): the scale of each logit."""
        return torch.cat([s.expand(k) for s, k in zip(self.scale, self.sizes, strict=True)])


class HyperConnection(Module):
    """One site: reads the streams before a mixer, and writes its output back into them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        streams: int
        sinkhorn_iters: int
        eps: float
        norm_eps: float
        affine: MixAffine.Config

    project: ClassVar[Kernel] = staticmethod(project_reference)
    """A function like ``kernels.hyper_connections.mapping.project``."""

    sinkhorn: ClassVar[Kernel] = staticmethod(sinkhorn_reference)
    """A function like ``kernels.hyper_connections.sinkhorn.sinkhorn``."""

    read: ClassVar[Kernel] = staticmethod(read_reference)
    """A function like ``kernels.hyper_connections.read.read``."""

    merge: ClassVar[Kernel] = staticmethod(merge_reference)
    """A function like ``kernels.hyper_connections.merge.merge``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        n = config.streams
        self.fn = nn.Parameter(torch.empty(n * (n + 2), n * config.dim))
        self.affine = config.affine.build()

    def forward(
        self, streams: torch.Tensor, made_of: MadeOf = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read the streams.

        Args:
            streams: (B, L, n, D).
            made_of: kept instead of the streams, by functions that know how (the trimmed ones).

        Returns:
            The mixer's input (B, L, D) in the dtype of ``streams``; the streams to be given to
            ``write``; the weight ``post`` (B, L, n) of the mixer's output per stream, and the
            mixing matrix (B, L, n incoming, n outgoing), float32.
        """
        n = self.config.streams
        flat, kept = streams.reshape(-1, n * self.config.dim), (made_of,) if made_of else ()
        z = self.project(flat, self.fn, self.config.norm_eps, *kept)
        logits = self.affine(z).view(*streams.shape[:2], -1)
        pre = logits[..., :n].sigmoid() + self.config.eps
        post = 2 * logits[..., n : 2 * n].sigmoid()
        mix = self.sinkhorn(
            logits[..., 2 * n :].unflatten(-1, (n, n)), self.config.sinkhorn_iters, self.config.eps
        )
        return self.read(streams, pre, *kept), streams, post, mix

    def write(
        self,
        streams: torch.Tensor,
        out: torch.Tensor,
        post: torch.Tensor,
        mix: torch.Tensor,
        made_of: MadeOf = (),
        unread: bool = False,
    ) -> torch.Tensor:
        """Mix the streams and add the mixer's output to each.

        Args:
            streams, post, mix: from ``forward``.
            out: (B, L, D).
            made_of: as given to ``forward``.
            unread: whether nobody reads the result; counts where ``made_of`` is given, and in
                kernels.

        Returns:
            (B, L, n, D).
        """
        kept = (made_of, unread) if made_of else ()
        return self.merge(streams, out, post, mix, *kept)
