"""The definition of sparse latent attention, dense and in one piece: for tests of short inputs."""

import torch


def dense_sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    pools: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    *,
    size: int,
    scale: float,
) -> torch.Tensor:
    """As ``kernels.dsa.plain.sparse_mla``, with expanded keys and a (T, T) mask."""
    tokens, heads, d_qk = q.shape
    expanded = (latent @ kv_b.t()).view(tokens, heads, -1)
    k, v = expanded[..., :d_qk], expanded[..., d_qk:]
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    mask = token_mask(pools, position, start, size)
    probabilities = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khv->qhv", probabilities, v)


def token_mask(
    pools: torch.Tensor, position: torch.Tensor, start: torch.Tensor, size: int
) -> torch.Tensor:
    """bool (T, T): query attends to token. Written token by token, straight from the rule."""
    mask = torch.zeros(len(position), len(position), dtype=torch.bool)
    for t in range(len(position)):
        begin, seen = int(start[t]), int(position[t]) + 1
        for pool in pools[t].tolist():
            if pool >= 0:
                mask[t, begin + pool * size : begin + (pool + 1) * size] = True
        mask[t, begin + seen // size * size : begin + seen] = True
    return mask
