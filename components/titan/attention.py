"""Attention backends that replace torchtitan's FlexAttention through its override mechanism.

The replacements subclass FlexAttention's config because the trainer decides by its type whether to
build a mask, and keep its argument names because the sharding rules are keyed by them.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torchtitan.config import derive, override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.tools.utils import get_cuda_flash_attention_impl

from kernels.attention.naive import masked_attention
from kernels.attention.sdpa import chunked_sdpa, mask_of_queries
from kernels.position.alibi import DistanceBias

AttentionBackend = Literal["flex", "varlen", "sdpa"]
OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def resolve_attention(wanted: str, device: str) -> AttentionBackend:
    """``auto`` becomes ``flex`` on CUDA and ``sdpa`` elsewhere.

    Raises:
        ValueError: a backend without a backward pass on this device.
    """
    if wanted == "auto":
        return "flex" if device == "cuda" else "sdpa"
    if device == "cpu" and wanted in ("flex", "varlen"):
        raise ValueError(
            f"model.attention: {wanted!r} has no backward pass on a CPU; use 'sdpa' or 'auto'"
        )
    if wanted == "varlen" and get_cuda_flash_attention_impl() == "FA3":
        _require_flash_attention_3()
    return wanted  # type: ignore[return-value]


def _require_flash_attention_3() -> None:
    """torchtitan runs varlen attention on Hopper through FlashAttention 3, a separate package."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        raise ValueError(
            "model.attention: 'varlen' needs FlashAttention 3 on this GPU (module "
            "flash_attn_interface, which is not installed); use 'flex' or 'auto'"
        )


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """Raise on arguments that a replacement would have to leave out of the computation.

    torchtitan's decoders pass ``attention_masks``, ``scale``, ``enable_gqa`` and ``out_transform``.

    Raises:
        TypeError: there is any.
    """
    if arguments:
        raise TypeError(
            f"model.attention: the model passes {', '.join(arguments)} to its attention, which "
            "'sdpa' and 'flex' cannot honour; on a GPU, torchtitan's own attention takes it: "
            "model.attention=flex model.flex_autotune=true"
        )


class SdpaAttention(FlexAttention):
    """``scaled_dot_product_attention`` under FlexAttention's mask. Runs on any device."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        scale: float | None = None,
        out_transform: OutTransform | None = None,
        score_mod: Any = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        """Attention over (B, L, heads, H) tensors; returns (B, Lq, N, H).

        ``out_transform`` (attention sinks) needs the log-sum-exp, which torch's op does not give:
        the dense fp32 path serves it.
        """
        refuse_unknown(others)
        if score_mod is not None and not isinstance(score_mod, DistanceBias):
            raise ValueError(
                "model.attention: 'sdpa' cannot apply a score_mod other than ALiBi's; use 'flex'"
            )
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        if out_transform is None:
            out = chunked_sdpa(q, k, v, attention_masks.mask_mod, scale, bias=score_mod)
            return out.transpose(1, 2)
        mask = mask_of_queries(
            attention_masks.mask_mod, q.shape[0], 0, q.shape[2], k.shape[2], q.device
        )
        bias = None if score_mod is None else score_mod.rows(0, q.shape[2], k.shape[2])
        out, lse = masked_attention(q, k, v, mask, scale, bias)
        return out_transform(out.transpose(1, 2), lse.transpose(1, 2))


class QuickFlexAttention(FlexAttention):
    """FlexAttention compiled without max-autotune.

    torchtitan autotunes FlexAttention for every sequence length, which takes minutes at 32K and
    more before the first step; inductor's default kernel configuration compiles in seconds.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    # One compiled function for the whole model; compiling per layer would repeat the work.
    _quick: ClassVar[Callable] = staticmethod(torch.compile(flex_attention, dynamic=False))

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Attention over (B, L, heads, H) tensors; returns (B, Lq, N, H)."""
        refuse_unknown(others)
        out, aux = QuickFlexAttention._quick(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            score_mod=score_mod,
            block_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
            return_aux=AuxRequest(lse=out_transform is not None),
            kernel_options=self.kernel_options,
        )
        out = out.transpose(1, 2)
        return out if out_transform is None else out_transform(out, aux.lse.transpose(1, 2))


@override(target=FlexAttention.Config, description="torch SDPA under FlexAttention's mask")
def sdpa(cfg: FlexAttention.Config) -> SdpaAttention.Config:
    return derive(cfg, SdpaAttention.Config)


@override(target=FlexAttention.Config, description="FlexAttention without max-autotune")
def quick_flex(cfg: FlexAttention.Config) -> QuickFlexAttention.Config:
    return derive(cfg, QuickFlexAttention.Config)
