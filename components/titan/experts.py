"""Routed experts in two steps, so that backward can run the first again and leave the second out.

An expert's last product, ``hidden @ w2.T``, is linear: its gradients need ``hidden`` alone, and so
does the gradient of a route's weight. Recomputing the product itself would be dead work.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchtitan.models.common.moe import GroupedExperts

Weights = Mapping[str, torch.Tensor]
"""By the names of the module's parameters; each (experts, ...), of any number of experts."""

Hidden = Callable[[torch.Tensor, Weights, torch.Tensor], torch.Tensor]
"""Rows sorted by expert (R, D), weights, ends of the experts' rows int32 -> (R, F)."""


@runtime_checkable
class _InTwoSteps(Protocol):
    def hidden(self, rows: torch.Tensor, weights: Weights, ends: torch.Tensor) -> torch.Tensor: ...


LAST = "w2_EDF"
"""Name of the last product's weight, (experts, D, F)."""


def hidden_of(experts: nn.Module) -> Hidden:
    """What some experts do before their last product.

    Raises:
        ValueError: the experts are of a kind that is not known in two steps.
    """
    # A subclass of torchtitan's may do anything in between, unless it says what.
    if isinstance(experts, _InTwoSteps):
        return experts.hidden
    if type(experts) is not GroupedExperts:
        raise ValueError(
            f"the routed experts are {type(experts).__name__}, whose last product cannot be told "
            "from the others; legal: torchtitan's GroupedExperts, or experts with a hidden method"
        )

    return partial(_hidden, experts)


def _hidden(
    experts: GroupedExperts, rows: torch.Tensor, weights: Weights, ends: torch.Tensor
) -> torch.Tensor:
    given = rows.bfloat16()

    def product(name: str) -> torch.Tensor:
        weight = weights[name].bfloat16().transpose(-2, -1)
        return experts._grouped_mm(A=given, B_t=weight, offs=ends)

    return F.silu(product("w1_EFD")) * product("w3_EFD")
