"""Dense masked attention in fp32: the slow twin that every other attention is compared with."""

import math

import torch


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the keys that ``mask`` allows.

    Args:
        q: (B, N, Lq, H), any float dtype; N query heads.
        k: (B, M, Lk, H), N a multiple of M; head n reads key head n // (N / M).
        v: (B, M, Lk, Hv).
        mask: bool, broadcastable to (B, N, Lq, Lk); True where the key may be read. A row without
            any key gives a zero output and a log-sum-exp of -inf.
        scale: factor on the scores; H ** -0.5 when None.
        bias: added to the scaled scores; broadcastable to (B, N, Lq, Lk).

    Returns:
        Output (B, N, Lq, Hv) in q's dtype and log-sum-exp (B, N, Lq) in fp32 (natural logarithm).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1).float() for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q.float() @ k.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    reachable = torch.where(lse.isinf(), torch.zeros_like(lse), lse)
    return (torch.exp(scores - reachable.unsqueeze(-1)) @ v).to(q.dtype), lse
