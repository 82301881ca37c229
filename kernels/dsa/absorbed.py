"""Latent attention in the absorbed form, over the tokens that a few queries selected.

Every head's key and value are linear maps of one latent row per token, so the maps are applied to
the query and to the output instead of to all tokens (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

import torch

from kernels.dsa.keys import selected_tokens
from kernels.precision import accumulation_dtype

CHUNK_BYTES = 256 * 2**20
"""Working memory of the queries that are computed together."""


def split_maps(kv_b: torch.Tensor, heads: int, d_qk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The maps from the latent to keys (heads, d_qk, r) and to values (heads, d_v, r).

    In full precision.

    Args:
        kv_b: (heads * (d_qk + d_v), r); per head first the rows of the key, then of the value.
        heads: heads of the attention.
        d_qk: width of a key.
    """
    per_head = kv_b.to(accumulation_dtype(kv_b.dtype)).view(heads, -1, kv_b.shape[1])
    return per_head[:, :d_qk], per_head[:, d_qk:]


def queries_at_once(slots: int, rank: int, heads: int, element_size: int) -> int:
    """How many queries of ``slots`` keys fit ``CHUNK_BYTES``, with what both passes need."""
    return max(1, CHUNK_BYTES // max(1, slots * (2 * rank + 4 * heads) * element_size))


class Selected:
    """A few queries over their selected tokens.

    Attributes:
        tokens: int64 (Q, K), flat indices.
        q: (Q, heads, d_qk) in full precision.
        keys: (Q, K, r), latent rows of the tokens.
        absorbed: (Q, heads, r), queries mapped into the latent.
        probabilities: (Q, heads, K), zero in unused slots.
    """

    def __init__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        w_key: torch.Tensor,
        pools: torch.Tensor,
        position: torch.Tensor,
        start: torch.Tensor,
        size: int,
        scale: float,
    ) -> None:
        """``latent`` (T, r) and ``w_key`` are in full precision; the rest is of the Q queries."""
        self.tokens, used = selected_tokens(pools, position, start, size)
        self.q = q.to(latent.dtype)
        self.keys = latent[self.tokens]
        self.absorbed = torch.einsum("qhd,hdr->qhr", self.q, w_key)
        logits = torch.einsum("qhr,qkr->qhk", self.absorbed, self.keys) * scale
        self.probabilities = logits.masked_fill_(~used.unsqueeze(1), float("-inf")).softmax(-1)
