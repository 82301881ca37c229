"""What the chunks of a rank's tokens send."""

import torch

from components.expert_dispatch.partition import Partition, chunk_of, count_pairs


def send_table(cut: Partition, destination: torch.Tensor, others: int) -> torch.Tensor:
    """Routes that each chunk sends to each rank, or expert: int64 (K, others).

    Args:
        destination: of every route, int64 (N, top_k); below ``others``.
    """
    chunk = chunk_of(cut.tokens, cut.chunks, cut.membership, destination.device)
    return count_pairs(chunk, destination, cut.chunks, others, torch.int64)
