"""What methods of splitting softmax attention send, compute and wait for: checks of every rank."""

from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from components.context_parallel.collectives import Link
from components.context_parallel.layout import KINDS
from components.context_parallel.softmax import rings
from components.context_parallel.softmax.attend import Exchange, attend
from components.context_parallel.softmax.flex import FlexKernel
from components.context_parallel.softmax.kernel import PlainKernel
from components.context_parallel.softmax.volume import Heads, softmax_volume
from tests.distributed.softmax_support import (
    BATCHES,
    CASES,
    VALUE,
    WIDTH,
    Case,
    assert_same,
    defined,
    exchanges,
    inputs,
    share_of,
    split,
)


def sent(exchange: Exchange, case: Case, share: Any, dtype: torch.dtype) -> tuple[int, int]:
    own = {n: share.take(t) for n, t in inputs(case, share.layout.lengths, dtype).items()
           if n != "sinks"}  # fmt: skip
    q, k, v = (own[n].requires_grad_() for n in ("q", "k", "v"))
    share.link.traffic.reset()
    out, lse = attend(q, k, v, share, exchange, case.scores(), PlainKernel(), case.sinks)
    loss = (out * own["pull"]).sum()
    (loss if lse is None else loss + lse.sum()).backward()
    traffic = share.link.traffic
    return traffic.total("forward"), traffic.total("backward")


def volumes() -> None:
    """Bytes in either direction equal the formulas, for every batch."""
    link = Link(dist.group.WORLD)
    layers = [CASES[layer] for layer in ("one key head", "small window", "wide window")]
    for turn, lengths in enumerate(BATCHES[link.size].values()):
        dtype, kind = (torch.float32, torch.bfloat16)[turn // 2 % 2], KINDS[turn % 2]
        share = share_of(lengths, kind, link)
        for case, (name, exchange) in product(layers, exchanges(link.size).items()):
            if case.fits(exchange, link.size):
                heads = Heads(case.heads, case.key_heads, WIDTH, VALUE)
                expected = softmax_volume(
                    exchange, share.layout, link.rank, heads, dtype.itemsize, case.window,
                    case.sinks,
                )  # fmt: skip
                assert sent(exchange, case, share, dtype) == expected, (name, kind, lengths, case)


def published_formulas() -> None:
    """Of one document in equal contiguous shares, spelled out; nothing where none is cut."""
    link, case, e = Link(dist.group.WORLD), Case(key_heads=4), 2
    ranks, n = link.size, 32
    width = 4 * (WIDTH + VALUE)
    share = share_of((n * ranks,), "contiguous", link)
    counted = {name: sent(x, case, share, torch.bfloat16) for name, x in exchanges(ranks).items()}
    others = ranks - 1
    gathered = n * width * others
    assert counted["all_gather"] == (gathered * e, gathered * (e + 4))
    both = n * 2 * width * e * others // ranks
    assert counted["ulysses"] == (both, both)
    # The last rank's tokens never leave it, so whoever would pass them on sends one share less.
    saved = n * width * (link.rank != ranks - 2)
    assert counted["ring"][0] == (gathered - saved) * e
    for name in counted:
        if name.startswith("double_ring"):
            # Every rank meets every other's rows once, in whatever order; all sums get home.
            total = torch.tensor([counted[name], counted["ring"]])
            dist.all_reduce(total)
            assert total[0, 0] == total[1, 0]
    assert counted["window"][0] == n * width * e * (ranks - 1 - link.rank)
    small = Case(key_heads=4, window=9)
    halo = sent(Exchange("window"), small, share, torch.bfloat16)
    goes_on, comes = int(link.rank < ranks - 1), int(link.rank > 0)
    row = 8 * width
    assert halo == (goes_on * row * e, goes_on * row * e + comes * row * 4)
    uncut = share_of((16,) * 2 * ranks, "zigzag", link)
    for name, exchange in exchanges(ranks).items():
        found = sent(exchange, case, uncut, torch.bfloat16)
        assert found == (0, 0) or name == "ulysses", name


def unseen_blocks_are_skipped() -> None:
    """A zigzag leaves every rank as many blocks; a window or short documents leave fewer."""
    link, case = Link(dist.group.WORLD), Case()
    ranks = link.size

    def blocks(lengths: tuple[int, ...], kind: Any, layer: Case = case) -> list[int]:
        share, count = share_of(lengths, kind, link), 0
        plain = PlainKernel.forward

        def counting(self: Any, *args: Any) -> Any:
            nonlocal count
            count += 1
            return plain(self, *args)

        with patch.object(PlainKernel, "forward", counting):
            sent(Exchange("ring"), layer, share, torch.float64)
        found = torch.zeros(ranks, dtype=torch.int64)
        found[link.rank] = count
        dist.all_reduce(found)
        return found.tolist()

    assert blocks((32 * ranks,), "contiguous") == [*range(1, ranks + 1)]
    assert blocks((32 * ranks,), "zigzag") == [2 * ranks + 1] * ranks
    assert blocks((16,) * 2 * ranks, "zigzag") == [2] * ranks
    assert blocks((32 * ranks,), "contiguous", Case(window=8)) == [1] + [2] * (ranks - 1)


class Direct(FlexKernel):
    """Forward by the plain kernel, which must not run within a backward."""

    def __init__(self) -> None:
        super().__init__(direct=True)
        self.blocks, self.forwards = 0, 0

    def forward(self, *args: Any) -> Any:
        self.forwards += 1
        return PlainKernel().forward(*args)

    attend = forward

    def backward(self, *args: Any) -> Any:
        self.blocks += 1
        before = self.forwards
        found = super().backward(*args)
        assert self.forwards == before
        return found


def forwards_are_not_run_again() -> None:
    """FlexAttention's backward of blocks adds up to that of one process, with no forward in it."""
    link, case = Link(dist.group.WORLD), CASES["odd heads"]
    lengths = BATCHES[link.size]["ragged total"]
    tensors = inputs(case, lengths)
    wanted = defined(case, lengths, tensors)
    for name, exchange in exchanges(link.size).items():
        # Ulysses lets autograd differentiate one block, of all tokens.
        if exchange.method != "ulysses":
            kernel = Direct()
            found = split(case, exchange, share_of(lengths, "zigzag", link, 1), tensors, kernel)
            assert_same(name, found, wanted)
            assert kernel.blocks == kernel.forwards > 1, name


def transfers_overlap_work() -> None:
    """The next rows are on their way before a block is computed, and awaited after it."""
    link, events = Link(dist.group.WORLD), []
    start, plain = rings.CountedRing.start, PlainKernel.forward

    def starting(self: Any, *args: Any) -> Any:
        hop = start(self, *args)
        events.append("start")
        wait = hop.wait
        hop.wait = lambda: (events.append("wait"), wait())
        return hop

    def computing(self: Any, *args: Any) -> Any:
        events.append("work")
        return plain(self, *args)

    share = share_of((32 * link.size,), "contiguous", link)
    with (
        patch.object(rings.CountedRing, "start", starting),
        patch.object(PlainKernel, "forward", computing),
        torch.no_grad(),
    ):
        tensors = {n: share.take(t) for n, t in inputs(Case(), (32 * link.size,)).items()
                   if n != "sinks"}  # fmt: skip
        attend(tensors["q"], tensors["k"], tensors["v"], share, Exchange("ring"), Case().scores(),
               PlainKernel())  # fmt: skip
    assert events[:3] == ["start", "work", "wait"]
    assert events.count("start") == events.count("wait") == link.size - 1
