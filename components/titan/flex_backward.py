"""FlexAttention's backward for a block of an attention's keys, from what is known of all of them.

Autograd runs it from what its own forward has found, the log-sum-exp of the block alone. The
operator itself takes any: given that of all keys, it returns what the block adds to the gradients,
and no forward is run again.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from kernels.position.alibi import DistanceBias

_OPTIONS: dict[str, Any] = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
    # Whole tiles: no load or store is masked.
    "IS_DIVISIBLE": True,
}
"""What ``flex_attention`` gives the operator when it is asked for nothing else, and one more."""

LN2 = math.log(2.0)


def block_gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    bias: DistanceBias | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their dtypes, each rounded once. To be compiled.

    L and S are multiples of the mask's tiles.

    Args:
        grad_out: (1, N, L, Hv), of the output over all keys, in the dtype of q.
        grad_lse: (1, N, L), times log 2: the gradient of the log-sum-exp less the product of output
            and output gradient.
        lse: (1, N, L), over all keys, by powers of 2: divided by log 2. Contiguous, which the
            kernel takes for granted.
        q: (1, N, L, H).
        k: (1, M, S, H).
        v: (1, M, S, Hv).
        bias: whose rates get no gradients, or None.
    """
    if torch.compiler.is_dynamo_compiling():
        # As in ``flex_attention``: kernels are made for their heads.
        for t in (q, k, v, grad_out):
            torch._dynamo.mark_static(t, 1)
            torch._dynamo.mark_static(t, 3)
    # It would subtract the product of output and gradient; that is in ``grad_lse``, unrounded.
    nothing = torch.zeros_like(grad_out)
    grads = torch.ops.higher_order.flex_attention_backward(
        q, k, v, nothing, lse, grad_out, grad_lse, _spelt_out(bias), None,
        mask.as_tuple(), scale, _OPTIONS, (), (),
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _spelt_out(bias: DistanceBias | None) -> Callable[..., torch.Tensor]:
    """The bias, indexing by an operator: the derivation of what is called directly takes brackets
    around a tensor for a number that is not known."""
    if bias is None:
        return _same
    slopes, queries, keys = bias.slopes, bias.queries, bias.keys
    at = torch.ops.aten.index.Tensor

    def distant(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return score + at(slopes, [h]) * (at(keys, [k]) - at(queries, [q]))

    return distant


def _same(
    score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    return score
