"""flash-linear-attention's kernels in place of the plain ones, through torchtitan's overrides."""

from dataclasses import dataclass

from torchtitan.config import derive, override

from components.models.glm_flash.kda import KdaCore
from components.models.glm_flash.short_conv import ShortConv
from kernels.kda.fla import kda, kda_piece
from kernels.short_conv.fla import short_conv


class FlaKdaCore(KdaCore):
    """The recurrence in fla's ``chunk_kda``, gate and normalisation inside the kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(KdaCore.Config):
        pass

    kernel = staticmethod(kda)
    piece_kernel = staticmethod(kda_piece)


class FlaShortConv(ShortConv):
    """The convolution in fla's Triton kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(ShortConv.Config):
        pass

    kernel = staticmethod(short_conv)


@override(target=KdaCore.Config, description="KDA in flash-linear-attention's kernels")
def fla_kda(cfg: KdaCore.Config) -> FlaKdaCore.Config:
    return derive(cfg, FlaKdaCore.Config)


@override(target=ShortConv.Config, description="short convolution in fla's kernel")
def fla_short_conv(cfg: ShortConv.Config) -> FlaShortConv.Config:
    return derive(cfg, FlaShortConv.Config)
