"""Batches cut over context ranks by a function of ours, in torchtitan's trainer and validator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torchtitan.components.validate
import torchtitan.trainer
from torch.distributed.device_mesh import DeviceMesh

Batch = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""Token ids, labels and keyword arguments of the model."""

Cut = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], Batch]
"""A whole batch, which all context ranks hold alike -> this rank's share of it."""

_USERS = (torchtitan.trainer, torchtitan.components.validate)
_NAME = "prepare_context_parallel_input"


@contextmanager
def batches_cut_by(cut: Cut) -> Iterator[None]:
    """While open, every batch of a run with several context ranks is cut by ``cut``.

    torchtitan cuts before a trainer's subclass sees the inputs, in two places, both of which call
    one function by its name in their module.
    """

    def prepare(
        inputs: torch.Tensor,
        labels: torch.Tensor,
        extra_kwargs: dict[str, Any],
        cp_mesh: DeviceMesh,
        device: torch.device,
        load_balancer_type: str | None = None,
        ptrr_mask_key: str | None = None,
    ) -> Batch:
        return cut(inputs, labels, extra_kwargs)

    stock = [getattr(module, _NAME) for module in _USERS]
    for module in _USERS:
        setattr(module, _NAME, prepare)
    try:
        yield
    finally:
        for module, function in zip(_USERS, stock, strict=True):
            setattr(module, _NAME, function)
