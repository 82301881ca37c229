"""Blocks in FlexAttention, compiled: for CUDA. Nothing is as large as queries times keys."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from components.context_parallel.softmax.kernel import (
    Block,
    Gradients,
    Kernel,
    Outputs,
    Scores,
    shift_of,
)
from components.context_parallel.softmax.tiles import View
from components.titan.flex_backward import LN2, block_gradients
from kernels.position.alibi import DistanceBias


def compiled(function: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
    """One compiled function for all layers, for blocks of any lengths.

    It must never fall back to what is not compiled, which holds a number for every query and key;
    so it is an error to compile more often than kinds of layers and passes call for.
    """
    # Its overloads leave the limit out.
    compile_: Any = torch.compile
    return compile_(
        function,
        backend=backend,
        dynamic=True,
        fullgraph=True,
        recompile_limit=32,
        isolate_recompiles=True,
    )


DIRECT = False
"""Whether backward takes the log-sum-exp over all keys, and so runs no forward again, where nothing
is said of it. Off until it has been measured."""

_attention = compiled(flex_attention)
_gradients = compiled(block_gradients)
# Captured alone, which it needs: of all queries and keys at once, for comparisons.
_unfused_gradients = compiled(block_gradients, "eager")

_views: WeakKeyDictionary[Any, dict[tuple[int, ...], View]] = WeakKeyDictionary()


class DifferentiableKernel(Kernel):
    """A kernel whose backward lets autograd differentiate its forward.

    That knows the log-sum-exp of the block's own keys alone, so backward runs forward again, and
    turns the gradients over all keys into those of the block's own output and log-sum-exp.
    """

    def backward(
        self,
        grad_out: torch.Tensor,
        shift: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block: Block,
        scores: Scores,
    ) -> Gradients:
        """See ``Kernel``; gradients are rounded to the dtype of q once for each block."""
        tensors = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            out, own_lse = self.attend(tensors[0], tensors[1], tensors[2], block, scores)
        # This block's weight among all: out is the sum of weight x out, lse the log of the sum.
        weight = torch.exp(own_lse.detach() - lse)
        # Of mixed precisions, and rounded: no wider copies of all queries are made.
        upstream = torch.empty_like(grad_out, dtype=out.dtype)
        torch.mul(grad_out, weight.unsqueeze(-1), out=upstream)
        product = shift_of(out.detach(), grad_out, None)
        grad_q, grad_k, grad_v = torch.autograd.grad(
            (out, own_lse), tensors, (upstream, weight * (product - shift))
        )
        return grad_q, grad_k, grad_v


class FlexKernel(DifferentiableKernel):
    """FlexAttention under a block mask. Compiled on CUDA; elsewhere only ``direct`` has a backward.

    Args:
        direct: whether backward runs no block's forward again. Every block can be done so.
    """

    def __init__(self, direct: bool = DIRECT) -> None:
        self.direct = direct

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scores: Scores
    ) -> Outputs:
        """See ``Kernel``."""
        with torch.no_grad():
            return self.attend(q, k, v, block, scores)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scores: Scores
    ) -> Outputs:
        """See ``Kernel``; differentiable on CUDA."""
        view = view_of(block)
        q_1NLH, k_1MLH, v_1MLH = (
            F.pad(t.transpose(0, 1), (0, 0, 0, len(places) - len(t))).contiguous().unsqueeze(0)
            for t, places in ((q, view.queries), (k, view.keys), (v, view.keys))
        )
        flex: Any = _attention if q.is_cuda else flex_attention
        out, aux = flex(
            q_1NLH,
            k_1MLH,
            v_1MLH,
            score_mod=_bias(view, scores),
            block_mask=view.mask(scores.window),
            scale=scores.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        out, lse = (t.squeeze(0).transpose(0, 1)[: len(q)] for t in (out, aux.lse))
        return out, lse

    def backward(
        self,
        grad_out: torch.Tensor,
        shift: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block: Block,
        scores: Scores,
    ) -> Gradients:
        """See ``Kernel``; gradients are rounded to the dtype of q once for each block."""
        if not self.direct:
            return super().backward(grad_out, shift, lse, q, k, v, block, scores)
        view = view_of(block)
        queries, keys = len(view.queries), len(view.keys)
        run = _gradients if q.is_cuda else _unfused_gradients
        with torch.no_grad():
            inputs = (
                _heads(grad_out, queries),
                _heads(-LN2 * shift, queries).contiguous(),
                _heads(lse / LN2, queries).contiguous(),
                _heads(q, queries),
                _heads(k, keys),
                _heads(v, keys),
            )
        # No input asks for gradients; but the operator derives the bias as it is captured.
        with torch.enable_grad():
            grads = run(*inputs, view.mask(scores.window), _bias(view, scores), scores.scale)
        grad_q, grad_k, grad_v = (
            grad.squeeze(0).transpose(0, 1)[: len(t)]
            for grad, t in zip(grads, (q, k, v), strict=True)
        )
        return grad_q, grad_k, grad_v


def _heads(rows: torch.Tensor, count: int) -> torch.Tensor:
    """(rows, N, ...) -> (1, N, count, ...), filled up with 0; a view of whole tiles.

    Always of the same strides for a shape: others would be compiled anew.
    """
    if count > len(rows):
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, count - len(rows)))
    return rows.contiguous().transpose(0, 1).unsqueeze(0)


def _bias(view: View, scores: Scores) -> DistanceBias | None:
    if scores.slopes is None:
        return None
    return DistanceBias(scores.slopes, view.queries, view.keys)


def view_of(block: Block) -> View:
    """The same for all layers of a batch, in forward and backward."""
    if block.batch is None:
        return View(block)
    made = _views.setdefault(block.batch, {})
    key = (block.first_query, len(block.start), block.first_key, block.keys)
    if key not in made:
        made[key] = View(block)
    return made[key]
