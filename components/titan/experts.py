"""Routed experts taken apart into products and an activation.

``w2 @ swiglu(w1 @ x, w3 @ x)`` for every row. Whoever runs the parts itself decides what is
kept in between and in which order gradients are made, and can leave the last product out of a
second run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
from torchtitan.models.common.moe import GroupedExperts

from kernels.grouped_mm import grouped_mm

GATE, UP, LAST = "w1_EFD", "w3_EFD", "w2_EDF"
"""Names of the parameters: (experts, F, D) twice, and (experts, D, F)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What some experts are made of."""

    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """Rows sorted by expert (R, in), weights (experts, out, in), ends of the experts' rows int32
    (experts,) -> (R, out)."""

    limit: float
    """Of the activation, see ``kernels.expert_rows.op.swiglu``."""

    dtype: torch.dtype | None
    """Of the products' operands; None: that of the rows, which is that of the weights as well."""


def parts_of(experts: nn.Module) -> Parts:
    """Take some experts apart.

    Raises:
        ValueError: the experts are of a kind whose parts are not known.
    """
    # A subclass of torchtitan's may do anything in between, unless it says what.
    limit = getattr(getattr(experts, "activation", None), "limit", None)
    if limit is not None:
        return Parts(product=grouped_mm, limit=limit, dtype=None)
    if type(experts) is not GroupedExperts:
        raise ValueError(
            f"the routed experts are {type(experts).__name__}, whose last product cannot be told "
            "from the others; legal: torchtitan's GroupedExperts, or experts whose activation is "
            "SwiGLU with a limit"
        )
    return Parts(product=partial(_product, experts), limit=math.inf, dtype=torch.bfloat16)


def _product(
    experts: GroupedExperts, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    if not len(rows):
        return rows.new_empty(0, weight.shape[1])
    return experts._grouped_mm(A=rows, B_t=weight.transpose(-2, -1), offs=ends)
