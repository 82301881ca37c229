"""Blocks in FlexAttention, compiled: for CUDA. Nothing is as large as queries times keys."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torchtitan.models.common.attention import create_attention_mask

from components.context_parallel.softmax.kernel import Block, Gradients, Kernel, Outputs, Scores
from kernels.precision import accumulation_dtype

# One compiled function for all layers and blocks; dynamic, as blocks differ in their lengths.
_compiled: Any = torch.compile(flex_attention)

# What the same batch's blocks see is the same in all layers of a kind, in forward and backward.
_masks: WeakKeyDictionary[Any, dict[tuple[Any, ...], BlockMask]] = WeakKeyDictionary()


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
        wide = accumulation_dtype(q.dtype)
        # This block's weight among all: out is the sum of weight x out, lse the log of the sum.
        weight = torch.exp(own_lse.detach() - lse)
        upstream = grad_out.to(wide) * weight.unsqueeze(-1)
        product = (grad_out.to(wide) * out.detach().to(wide)).sum(-1)
        grads = torch.autograd.grad(
            (out, own_lse), tensors, (upstream.to(out.dtype), weight * (product - shift))
        )
        grad_q, grad_k, grad_v = (g.to(wide) for g in grads)
        return grad_q, grad_k, grad_v


class FlexKernel(DifferentiableKernel):
    """FlexAttention under a block mask. Compiled on CUDA; elsewhere it has no backward."""

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
        flex: Any = _compiled if q.is_cuda else flex_attention
        q_1NLH, k_1MLH, v_1MLH = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out, aux = flex(
            q_1NLH,
            k_1MLH,
            v_1MLH,
            score_mod=block.bias(scores),
            block_mask=mask_of(block, scores.window),
            scale=scores.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return out.squeeze(0).transpose(0, 1), aux.lse.squeeze(0).transpose(0, 1)


def mask_of(block: Block, window: int | None) -> BlockMask:
    """Who sees whom; made once for all layers of a batch."""
    if block.batch is None:
        return _make_mask(block, window)
    made = _masks.setdefault(block.batch, {})
    key = (block.first_query, len(block.start), block.first_key, block.keys, window)
    if key not in made:
        made[key] = _make_mask(block, window)
    return made[key]


def _make_mask(block: Block, window: int | None) -> BlockMask:
    # Places as tensors: numbers would be constants of the compiled code.
    queries, keys, start = block.query_places(), block.key_places(), block.start

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found = (keys[k] >= start[q]) & (keys[k] <= queries[q])
        return found if window is None else found & (queries[q] - keys[k] < window)

    device = block.start.device
    return create_attention_mask(seen, None, None, len(block.start), block.keys, device=device)
