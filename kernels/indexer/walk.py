"""Score and choose window by window, on whatever writes the scores."""

from typing import Protocol

import torch

from kernels.backends.machine import HOPPER
from kernels.indexer import triton_topk
from kernels.indexer.windows import Window, Workspace, workspaces


class WriteScores(Protocol):
    """``triton_scores.write_scores`` or ``gluon_scores.write_scores``."""

    def __call__(
        self,
        queries: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        first: torch.Tensor,
        end: torch.Tensor,
        space: Workspace,
        window: Window,
        scale: float,
        key_factors: torch.Tensor | None,
    ) -> None: ...


def _on_hopper(device: torch.device) -> bool:
    return HOPPER.take(torch.cuda.get_device_capability(device))


def writer(device: torch.device) -> WriteScores:
    """The kernel that suits a CUDA device."""
    if _on_hopper(device):
        from kernels.indexer import gluon_scores

        return gluon_scores.write_scores
    from kernels.indexer import triton_scores

    return triton_scores.write_scores


class Choose(Protocol):
    """``triton_topk.choose`` or ``gluon_topk.choose``."""

    def __call__(
        self,
        space: Workspace,
        first: torch.Tensor,
        end: torch.Tensor,
        window: Window,
        out: torch.Tensor,
    ) -> None: ...


def chooser(device: torch.device) -> Choose:
    """The selection that suits a device; on a CPU the one that Triton's interpreter runs."""
    if device.type == "cuda" and _on_hopper(device):
        from kernels.indexer import gluon_topk

        return gluon_topk.choose
    return triton_topk.choose


def select(
    write_scores: WriteScores,
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    windows: tuple[Window, ...],
    count: int,
    scale: float,
    key_factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``op.select``; the operands are contiguous, queries and keys 16-byte aligned."""
    choose = chooser(queries.device)
    chosen = first.new_empty((len(queries), count))
    with torch.cuda.device_of(queries):
        for window, space in workspaces(windows, count, queries.device):
            out = chosen[window.q0 : window.q1]
            if window.width == 0:
                out.fill_(-1)
                continue
            write_scores(queries, weights, keys, first, end, space, window, scale, key_factors)
            choose(space, first, end, window, out)
    return chosen
