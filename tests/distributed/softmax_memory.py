"""What softmax attention over ranks holds at a time, in bytes of tensors: a check of every rank."""

import time
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from components.context_parallel.collectives import Link
from components.context_parallel.layout import Kind
from components.context_parallel.share import Share
from components.context_parallel.softmax.attend import Exchange, attend
from components.context_parallel.softmax.held import Held
from components.context_parallel.softmax.kernel import Kernel, Scores
from components.context_parallel.softmax.volume import Heads
from tests.distributed.softmax_support import exchanges, share_of
from tests.unit.test_kernel_shape_budget import Ledger

TOKENS, WIDTH = 128, 128
# Many query heads to a key head; as many; and, for Ulysses, fewer key heads than ranks.
LAYERS: tuple[tuple[Kind, int, int], ...] = (
    ("zigzag", 28, 4), ("contiguous", 4, 4), ("zigzag", 16, 1),
)  # fmt: skip
WINDOWS = 17, TOKENS // 2
PAUSES = 2e-3, 2e-2, 0.2


class Frugal(Kernel):
    """Makes what it returns, in the dtype of q, and nothing else."""

    def forward(self, q: Any, k: Any, v: Any, *others: Any) -> Any:
        """See ``Kernel``; nothing is computed."""
        return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)

    def backward(self, grad_out: Any, shift: Any, lse: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
        """See ``Kernel``; nothing is computed."""
        return tuple(t.new_zeros(t.shape) for t in (q, k, v))


def cases(ranks: int) -> Iterator[tuple[Exchange, int | None]]:
    """Every method, each window."""
    for exchange in exchanges(ranks).values():
        if exchange.method == "window":
            yield from product([exchange], WINDOWS)
        elif exchange.inner_ring != ranks:
            yield exchange, None


def memory_is_as_planned() -> None:
    """The most that any rank has at a time is what ``Held`` says, but for numbers per head."""
    link = Link(dist.group.WORLD)
    for kind, heads, key_heads in LAYERS:
        share = share_of((TOKENS * link.size,), kind, link)
        of_layer = Heads(heads, key_heads, WIDTH, WIDTH)
        held = Held(of_layer, TOKENS, link.size, len(share.parts), torch.bfloat16.itemsize)
        for exchange, window in cases(link.size):
            planned = held.beside(exchange, window)
            # Log-sum-exps, weights of parts, and blocks of rows.
            small = 5 * TOKENS * heads * 4
            for pause in PAUSES:
                found = measured(of_layer, share, exchange, window, pause)
                if found - planned <= small:  # of all ranks, so all of them end together
                    break
            case = kind, of_layer, exchange, window, found / planned
            assert abs(found - planned) <= small < planned / 8, case


def measured(
    heads: Heads, share: Share, exchange: Exchange, window: int | None, pause: float
) -> int:
    """Bytes beside what a layer makes of its own tokens; of the fullest rank, in either pass.

    Args:
        pause: seconds after each exchange. The backend's thread lets go of the tensors a moment
            after they have arrived, later on a busy machine; what it holds so long only adds.
    """
    q, k, v = (
        torch.ones(TOKENS, n, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        for n in (heads.heads, heads.key_heads, heads.key_heads)
    )
    pull, settled = torch.ones_like(q), dist.all_to_all_single

    def exchange_and_settle(*args: Any, **kwargs: Any) -> None:
        settled(*args, **kwargs)
        time.sleep(pause)

    with (
        patch.object(dist, "all_to_all_single", exchange_and_settle),
        patch("kernels.row_blocks.ELEMENTS", 2**12),
    ):
        with Ledger() as forward:
            out, _ = attend(q, k, v, share, exchange, Scores(1.0, window), Frugal())
        with Ledger() as backward:
            torch.autograd.grad(out, (q, k, v), pull)
    own = q.nbytes + k.nbytes + v.nbytes
    most = torch.tensor([max(forward.peak - out.nbytes, backward.peak - own)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)
