"""What may be asked of the optimizer, and what is wrong with the rest."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from components.core.shards import local_of
from components.streamed_adamw.layout import CUT

FIXED = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}
"""Options of torch's AdamW that have one value here; a checkpoint holds them for every group."""


def check_plan(
    bucket_parameters: int, slots: int, split: float | Literal["auto"], threads: int
) -> None:
    """
    Raises:
        ValueError: with the name, the value and what is legal.
    """
    if bucket_parameters < CUT:
        raise ValueError(f"bucket_parameters is {bucket_parameters}; it must be at least {CUT}")
    if slots < 1:
        raise ValueError(f"slots is {slots}; it must be at least 1, and 2 to copy beside updates")
    if split != "auto" and not (isinstance(split, int | float) and 0 <= split <= 1):
        raise ValueError(f'split is {split!r}; it must be "auto" or a number from 0 to 1')
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")


def check_group(group: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: an option of a parameter group is out of range or not supported.
    """
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0:
            raise ValueError(f"{name} is {group[name]}; it must be zero or more")
    if not all(0 <= float(beta) < 1 for beta in group["betas"]):
        raise ValueError(f"betas are {group['betas']}; both must be at least 0 and below 1")
    for name, only in FIXED.items():
        if group[name] != only:
            raise ValueError(f"{name} is {group[name]}; a streamed AdamW knows {only} alone")
    if group["foreach"]:
        raise ValueError("foreach is True; a streamed AdamW updates with torch's fused kernel")


def check_parameter(name: str, parameter: torch.Tensor, device: torch.device) -> None:
    """
    Args:
        name: for the message.
        parameter: as it is when its state is made.
        device: of the first parameter.

    Raises:
        ValueError: it is not fp32, not contiguous, or elsewhere.
    """
    local = local_of(parameter)
    if parameter.dtype != torch.float32:
        raise ValueError(
            f"{name} is {parameter.dtype}; master weights are made from torch.float32, and working "
            "weights may be rounded after that"
        )
    if not local.is_contiguous():
        raise ValueError(f"{name} has strides {local.stride()}; it must be contiguous")
    if local.device != device:
        raise ValueError(f"{name} is on {local.device}; all parameters must be on {device}")
