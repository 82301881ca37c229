"""Lengths of packed documents: what kernels that restart at each document ask of them."""

from itertools import accumulate

import torch

from kernels.tables import remembered


def check_lengths(lengths: tuple[int, ...], tokens: int) -> None:
    """Raise ValueError unless ``lengths`` are those of documents that fill ``tokens`` tokens."""
    if not lengths or min(lengths) < 1 or sum(lengths) != tokens:
        shown = f"{lengths[:8]}{'...' if len(lengths) > 8 else ''}"
        raise ValueError(
            f"lengths: {shown}, {len(lengths)} documents of {sum(lengths)} tokens; legal: at least "
            f"one document, each of 1 token or more, {tokens} tokens in all"
        )


def bounds(lengths: tuple[int, ...]) -> list[int]:
    """Where documents begin, and where the last one ends: n + 1 token indices."""
    return [0, *accumulate(lengths)]


@remembered(128)
def bound_tensors(
    lengths: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """``bounds`` as int32 (n + 1,) on ``device`` and on the CPU.

    The same objects come back for the same lengths: all layers of a step share one copy to the
    device, and libraries that remember by identity what they derive from them find it again.
    """
    host = torch.tensor(bounds(lengths), dtype=torch.int32)
    return host.to(device), host
