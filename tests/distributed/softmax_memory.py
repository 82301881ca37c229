"""What the ring holds at a time, in bytes of tensors that it makes: a check of every rank."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from components.context_parallel.collectives import Link
from components.context_parallel.softmax.attend import Exchange, attend
from components.context_parallel.softmax.kernel import Kernel, Scores
from tests.distributed.softmax_support import share_of
from tests.unit.test_kernel_shape_budget import Ledger

TOKENS, HEADS, KEY_HEADS, WIDTH = 256, 14, 2, 32


class Frugal(Kernel):
    """Makes what it returns, in the dtype of q, and nothing else."""

    def forward(self, q: Any, k: Any, v: Any, *others: Any) -> Any:
        """See ``Kernel``; nothing is computed."""
        return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)

    def backward(self, grad_out: Any, shift: Any, lse: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
        """See ``Kernel``; nothing is computed."""
        return tuple(t.new_zeros(t.shape) for t in (q, k, v))


def little_is_held() -> None:
    """One wide sum of outputs, and of gradients of queries; of keys and values what travels."""
    ranks = dist.get_world_size()
    share = share_of((TOKENS * ranks,), "zigzag", Link(dist.group.WORLD))
    q, k, v = (
        torch.ones(TOKENS, n, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        for n in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    rows, pull = k.nbytes + v.nbytes, torch.ones_like(q)
    small = 5 * TOKENS * HEADS * 4  # log-sum-exps, and weights of parts
    block = q.nbytes // 2  # a part's queries are half of a rank's
    with Ledger() as forward:
        out, _ = attend(q, k, v, share, Exchange("ring"), Scores(1.0), Frugal())
    # Wide outputs with a block's, then with all of them rounded; the rank's rows and two others'.
    assert forward.peak <= 2 * q.nbytes + q.nbytes + 3 * rows + small, forward.peak / q.nbytes
    with Ledger() as backward, patch("kernels.row_blocks.ELEMENTS", 2**12):
        torch.autograd.grad(out, (q, k, v), pull)
    # The rank's own sums, three that travel at most, rows of two others, a block's gradients.
    sums = (3 if ranks == 2 else 4) * 2 * rows
    allowed = 2 * q.nbytes + sums + 2 * rows + block + rows + small
    assert backward.peak <= allowed, (backward.peak / q.nbytes, allowed / q.nbytes)
