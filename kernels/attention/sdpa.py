"""Masked attention through torch's ``scaled_dot_product_attention``, in query chunks.

The mask comes as a FlexAttention ``mask_mod``, so causal, document and context-parallel masks all
work. Memory: the mask of every chunk is kept for backward, 4 bytes per query-key pair and layer in
fp32 (and head, with a bias), so this is for sequences up to about 8K tokens; longer ones want
FlexAttention on a GPU.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_mask

from kernels.position.alibi import DistanceBias

# cuDNN's masked kernel is left out: whether it runs depends on the cuDNN that is installed.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mask_of_queries(
    mask_mod: MaskMod, batch: int, start: int, stop: int, keys: int, device: torch.device
) -> torch.Tensor:
    """Rows ``start:stop`` of the mask: bool (batch, 1, stop - start, keys), True = may read."""

    def shifted(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return mask_mod(b, h, q + start, kv)

    return create_mask(shifted, batch, 1, stop - start, keys, device=device)


def chunked_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_mod: MaskMod,
    scale: float | None = None,
    query_chunk: int = 1024,
    bias: DistanceBias | None = None,
) -> torch.Tensor:
    """Attention of q over k and v under ``mask_mod``; every query must see at least one key.

    Args:
        q: (B, N, Lq, H).
        k, v: (B, M, Lk, H), N a multiple of M.
        mask_mod: FlexAttention mask function of (batch, head, query, key) indices.
        scale: factor on the scores; H ** -0.5 when None.
        query_chunk: queries per call; bounds the score matrix where the kernel materialises it.
        bias: added to the scores, which are then computed in fp32.

    Returns:
        (B, N, Lq, H) in q's dtype.
    """
    dtype = q.dtype
    if bias is not None:
        # A bias in bf16 would round distances above 256 tokens.
        q, k, v = q.float(), k.float(), v.float()
    if k.shape[1] != q.shape[1]:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    outputs = []
    for start in range(0, q.shape[2], query_chunk):
        stop = min(start + query_chunk, q.shape[2])
        mask = mask_of_queries(mask_mod, q.shape[0], start, stop, k.shape[2], q.device)
        if bias is not None:
            mask = torch.where(mask, bias.rows(start, stop, k.shape[2]), -math.inf)
        part = q[:, :, start:stop]
        with sdpa_kernel(BACKENDS):
            outputs.append(F.scaled_dot_product_attention(part, k, v, attn_mask=mask, scale=scale))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).to(dtype)
