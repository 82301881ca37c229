"""Sparse latent attention with the sequence split over ranks: keys travel, queries stay.

Every rank gathers the latent of all tokens and the pooled keys of all pools, for C ranks and e
bytes per element e (r + d / size) (C - 1) bytes per token that it holds, r and d being the widths
of latent and index key: 1,088 bytes for the published model in bfloat16. Backward gathers the
latent once more, so that none is kept, and sums its gradient over the ranks in float32.

Keys are pooled where their tokens are: no pool lies in two parts, so what weighs a pool's keys
never leaves the rank, and only finished keys have to be put in the order of the batch.
"""

from typing import Any

import torch

from components.context_parallel.collectives import collect, sum_shares
from components.context_parallel.share import Share
from components.models.glm_flash.indexer import Indexer, IndexerInputs
from components.models.glm_flash.mla import SparseMLA, SparseMlaCore
from components.recompute.tape import choice
from kernels.dsa.pooling import find_pools


def dsa_gathered(module: SparseMLA, x: torch.Tensor, share: Share) -> torch.Tensor:
    """``module`` on this rank's tokens; the same pools and outputs as by one process.

    Each parameter's gradient is this rank's share.

    Args:
        x: (n, D), the mixer's input.
        share: of n tokens.

    Returns:
        (n, D).

    Raises:
        ValueError: x has other rows, pools may lie in two parts, or the indexer is trained.
    """
    share.check_rows(x)
    size = module.core.config.kpool
    if share.layout.align % size:
        raise ValueError(
            f"align: {share.layout.align} tokens beside pools of {size} (model.index_kpool); "
            f"legal: multiples of {size}"
        )
    if module.indexer_loss is not None:
        raise ValueError(
            "components.indexer_training: enabled beside a sequence that is split over ranks "
            "(parallelism.context_parallel_degree); legal: one of the two"
        )
    query_latent, q = module.queries(x)
    pools = choice(lambda: choose_pools(module.indexer, x, query_latent, share))
    given = q, module.latent(x), module.kv_b_proj.weight, pools
    out = _GatheredAttention.apply(share, module.core, *given)
    return module.o_proj(out.flatten(1))


@torch.no_grad()
def choose_pools(
    indexer: Indexer, x: torch.Tensor, query_latent: torch.Tensor, share: Share
) -> torch.Tensor:
    """The pools of this rank's queries.

    Args:
        x: (n, D), the mixer's input.
        query_latent: (n, q_lora_rank), normalised.

    Returns:
        int32 (n, chosen): pools counted from the document's start, ascending, then -1.
    """
    queries, weights = indexer.queries(x, query_latent)
    keys = pooled_keys(indexer, x, share)
    pools = share.documents.pools(indexer.config.kpool)
    found = []
    for part, rows in zip(share.parts, share.rows, strict=True):
        asking = share.documents.rows(part.begin, part.stop)
        inputs = IndexerInputs(queries[rows], weights[rows], keys, pools)
        found.append(indexer.choose(inputs, asking, part.begin))
    return torch.cat(found)


def pooled_keys(indexer: Indexer, x: torch.Tensor, share: Share) -> torch.Tensor:
    """One key per complete pool of the batch, (P, d), numbered through the batch.

    Args:
        x: (n, D), this rank's rows of the mixer's input.
    """
    size, layout = indexer.config.kpool, share.layout
    # A part begins where a pool does, so its pieces of documents pool as documents would.
    mine = indexer.keys(x, find_pools(layout.fragments(share.rank), size, x.device))
    counts = [sum(length // size for length in part.lengths) for part in layout.parts]
    return collect(mine, layout.order_of(counts), share.link, "dsa.index_keys")


class _GatheredAttention(torch.autograd.Function):
    """From share, core, q (n, heads, d_qk), latent (n, r), kv_b and pools (n, chosen)."""

    @staticmethod
    def forward(
        ctx: Any, share: Share, core: SparseMlaCore, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.share, ctx.core = share, core
        q, latent, kv_b, pools = tensors
        whole = collect(latent, share.layout.order, share.link, "dsa.latent")
        return core.attend(q, whole, kv_b, (pools, share.position, share.start), False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, latent, kv_b, pools = ctx.saved_tensors
        share: Share = ctx.share
        order, link = share.layout.order, share.link
        whole = collect(latent, order, link, "dsa.latent", "backward")
        place = pools, share.position, share.start
        grad_q, grad_latent, grad_kv_b = ctx.core.gradients(
            grad_out.contiguous(), q, whole, kv_b, place
        )
        mine = sum_shares(grad_latent, order, link, "dsa.latent_gradient")
        return None, None, grad_q, mine.to(latent.dtype), grad_kv_b, None
