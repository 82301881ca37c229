"""Who sends how much where: the one thing about a layer that ranks tell each other, and the host.

How many chunks there are depends on the fullest rank, and what a chunk sends on how many there are.
Both are found on the device, with an all-reduce of one number that nobody reads, so that the host
waits once per layer: for the counts of all ranks. The fullest rank's tokens follow from these.
"""

import torch
import torch.distributed as dist

from components.expert_dispatch.partition import ChunkRule, chunk_of, count_pairs


def gather_counts(
    ids: torch.Tensor, experts: int, rule: ChunkRule, group: dist.ProcessGroup
) -> torch.Tensor:
    """Routes of each rank of the group, in each chunk, to each expert.

    An all-reduce of one number where there may be several chunks, one all-gather, and one read by
    the host. What is gathered has room for as many chunks as ``rule`` allows, P x max_chunks x E
    numbers of 4 bytes: 1 MiB for 64 ranks, 10 chunks and 384 experts. Ranks must have the same
    rule, or they wait for each other forever: have them compare it before (``partition.agree``).

    Args:
        ids: of this rank's routes, int64 (N, top_k); of every rank as many per token.
        experts: of the whole layer, E.

    Returns:
        int64 (P, K, E), on the CPU; K chunks, the same on every rank.
    """
    # int32: a layer has fewer than 2^31 routes, and half as much is sent.
    mine = count_pairs(_chunks(ids, rule, group), ids, rule.max_chunks, experts, torch.int32)
    everyone = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather_single(everyone.view(-1), mine.view(-1), group=group)
    counts = everyone.cpu().long()
    chunks = rule.cut(0, fullest(counts, ids.shape[1])).chunks
    return counts[:, :chunks].contiguous()


def fullest(counts: torch.Tensor, top_k: int) -> int:
    """Tokens of the fullest rank.

    Args:
        counts: routes of each rank, in each chunk, to each expert: int64 (P, K, E), on the CPU.
        top_k: routes of a token, 1 or more.
    """
    return int(counts.sum((1, 2)).max()) // top_k


def _chunks(ids: torch.Tensor, rule: ChunkRule, group: dist.ProcessGroup) -> torch.Tensor:
    """The chunk of every token: int64 (N,), on the device, unknown to the host."""
    tokens = len(ids)
    if rule.max_chunks == 1:
        return ids.new_zeros(tokens)
    # Filled in there: a number that is copied from the host makes it wait.
    largest = ids.new_full((1,), tokens)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return chunk_of(tokens, rule.chunks_on_device(largest), rule.membership, ids.device)
