"""Kernels in place of a hyper-connection's plain parts, through torchtitan's overrides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.config import derive, override

from components.models.glm_flash.hyper_connections import HyperConnection, MixAffine
from components.models.settings import KernelChoice
from kernels.backends.ops import HYPER_CONNECTIONS, HyperConnectionKernels
from kernels.backends.registry import ITEMSIZE, REFERENCE, Choice
from kernels.hyper_connections.merge import MadeOf
from kernels.hyper_connections.naive import Constants
from kernels.precision import accumulation_dtype

if TYPE_CHECKING:
    from components.models.glm_flash.settings import GlmFlashModel


class _HandOn(torch.autograd.Function):
    """The same tensor, and no view of it: FSDP warns of what modules return as views."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class MixTerms(MixAffine):
    """The numbers of a scale and shift that a kernel applies."""

    @dataclass(kw_only=True, slots=True)
    class Config(MixAffine.Config):
        pass

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """The streams as they are, and (2, n^2 + 2n): factors, and what is added.

        FSDP gathers a module's parameters when it is called, and knows from the gradient of what
        was given to it that theirs are complete: hence the streams.
        """
        wide = accumulation_dtype(streams.dtype)
        return _HandOn.apply(streams), torch.stack((self.factor(), self.base)).to(wide)


class FusedHyperConnection(HyperConnection):
    """Keeps the streams, or what they are made of, and 25 numbers a token (four streams), whatever
    else is trimmed."""

    @dataclass(kw_only=True, slots=True)
    class Config(HyperConnection.Config):
        backend: str
        """A name in ``HYPER_CONNECTIONS.backends``."""

    config: Config

    def forward(
        self, streams: torch.Tensor, made_of: MadeOf = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ``HyperConnection.forward``."""
        settings, (streams, terms) = self.config, self.affine(streams)
        constants = Constants(settings.norm_eps, settings.eps, settings.sinkhorn_iters)
        return self._guard(self._kernels.map_and_read)(streams, self.fn, terms, constants, made_of)

    def write(
        self,
        streams: torch.Tensor,
        out: torch.Tensor,
        post: torch.Tensor,
        mix: torch.Tensor,
        made_of: MadeOf = (),
        unread: bool = False,
    ) -> torch.Tensor:
        """See ``HyperConnection.write``."""
        return self._guard(self._kernels.merge)(streams, out, post, mix, made_of, unread)

    @property
    def _kernels(self) -> HyperConnectionKernels:
        return HYPER_CONNECTIONS.load(self.config.backend)

    def _guard(self, function: Callable) -> Callable:
        return HYPER_CONNECTIONS.guard(self.config.backend, function)


@override(target=HyperConnection.Config, description="hyper-connections in Triton")
def triton_hyper_connections(cfg: HyperConnection.Config) -> FusedHyperConnection.Config:
    affine = derive(cfg.affine, MixTerms.Config)
    return derive(cfg, FusedHyperConnection.Config, backend="triton", affine=affine)


_FACTORIES = {"triton": triton_hyper_connections}


def choose_hyper_connections(model: "GlmFlashModel", device: str, itemsize: int) -> Choice:
    """What maps, reads and merges the streams. See ``Operation.choose``."""
    shape = {"model.hc_mult": model.hc_mult, ITEMSIZE: itemsize}
    return HYPER_CONNECTIONS.choose(model.hyper_connections_kernel, device, shape)


def choose_connection_kernels(model: "GlmFlashModel", device: str, itemsize: int) -> KernelChoice:
    """The choice as what to change in the model.

    Raises:
        ValueError: what the settings ask for cannot run there.
    """
    choice = choose_hyper_connections(model, device, itemsize)
    overrides = () if choice.backend == REFERENCE else (_FACTORIES[choice.backend],)
    return KernelChoice(overrides=overrides, notes=(choice.note,))
