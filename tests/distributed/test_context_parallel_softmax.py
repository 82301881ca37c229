"""Softmax attention whose sequence is split over ranks against its definition in one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from components.context_parallel.collectives import Link, collect
from components.context_parallel.layout import KINDS, cut_batch
from components.context_parallel.softmax import fetch, ring, rings
from components.context_parallel.softmax.attend import METHODS, Exchange, attend
from components.context_parallel.softmax.fetch import GatherAll, SendSeen
from components.context_parallel.softmax.kernel import PlainKernel
from components.context_parallel.softmax.reach import Reach
from components.context_parallel.softmax.volume import Heads, softmax_volume
from components.vocabulary.ring import RidingSum
from tests.distributed.softmax_layers import DIMS, one_process, several
from tests.distributed.softmax_support import (
    BATCHES,
    CASES,
    VALUE,
    WIDTH,
    Case,
    alone,
    assert_same,
    defined,
    differences,
    exchanges,
    fails,
    inputs,
    share_of,
    split,
    whole_as_one,
)
from tests.distributed.spawn import run_ranks

pytestmark = pytest.mark.distributed


def combinations() -> Iterator[tuple[str, tuple[int, ...], Any, Case, Exchange]]:
    """Every batch, layout and method, each with one layer; one batch with all of them."""
    ranks = dist.get_world_size()
    every = product(BATCHES[ranks].items(), KINDS, CASES.items(), exchanges(ranks).items())
    turns = {name: turn for turn, name in enumerate([*BATCHES[ranks], *exchanges(ranks)])}
    for (batch, lengths), kind, (layer, case), (method, exchange) in every:
        turn = (turns[batch] + turns[method]) % len(CASES) == [*CASES].index(layer)
        if (turn or batch == "documents over every cut") and case.fits(exchange, ranks):
            yield f"{method}, {kind}, {batch}, {layer}", lengths, kind, case, exchange


def parity() -> None:
    """Outputs and gradients; for one batch also where all tokens of a rank are masked."""
    link, wanted = Link(dist.group.WORLD), {}
    for name, lengths, kind, case, exchange in combinations():
        tensors = inputs(case, lengths)
        if (case, lengths) not in wanted:
            wanted[case, lengths] = defined(case, lengths, tensors)
        share = share_of(lengths, kind, link, align=1 if "ragged" in name else 4)
        assert_same(name, split(case, exchange, share, tensors), wanted[case, lengths])
        if "every cut, grouped" in name:
            # As labels that are ignored do it: nothing pulls at these outputs.
            tensors["pull"][share.layout.order.index(1, torch.device("cpu"))] = 0
            masked = defined(case, lengths, tensors)
            assert_same(f"{name}, masked", split(case, exchange, share, tensors), masked)


def float32() -> None:
    """No more is lost than one process loses to rounding."""
    link, case = Link(dist.group.WORLD), CASES["one key head"]
    lengths = BATCHES[link.size]["documents over every cut"]
    narrow = inputs(case, lengths, torch.float32)
    exact = defined(case, lengths, {n: t.double() for n, t in narrow.items()})
    allowed = dict(differences(defined(case, lengths, narrow), exact))
    for name, exchange in exchanges(link.size).items():
        found = split(case, exchange, share_of(lengths, "zigzag", link), narrow)
        for tensor, error in differences(found, exact):
            assert error <= 2 * allowed[tensor] + 1e-6, (name, tensor, error)


def bfloat16() -> None:
    """Gradients of keys are rounded once, after they are summed; those of copied heads twice."""
    link, case = Link(dist.group.WORLD), CASES["one key head"]
    lengths = BATCHES[link.size]["one document"]
    narrow = inputs(case, lengths, torch.bfloat16)
    one = alone(case, lengths, narrow)
    for name, exchange in exchanges(link.size).items():
        found = split(case, exchange, share_of(lengths, "zigzag", link), narrow)
        for tensor in ("k", "v"):
            same = (found[tensor] == one[tensor]).float().mean().item()
            assert same > 0.97 or name == "ulysses" and same > 0.3, (name, tensor, same)


def documents_keep_apart() -> None:
    """What happens in one document changes no bit of another's outputs or gradients."""
    link, case = Link(dist.group.WORLD), Case()
    lengths = BATCHES[link.size]["documents over every cut"]
    first, stop = lengths[0], lengths[0] + lengths[1]
    for kind, (name, exchange) in product(KINDS, exchanges(link.size).items()):
        share, results = share_of(lengths, kind, link), []
        for change in (0, 3):
            tensors = inputs(case, lengths)
            for n in ("q", "k", "v", "pull"):
                tensors[n][first:stop] *= 1 + change
            results.append(split(case, exchange, share, tensors))
        for tensor, before in results[0].items():
            changed = (before != results[1][tensor]).flatten(1).any(-1)
            assert not changed[:first].any() and not changed[stop:].any(), (name, kind, tensor)
            assert changed[first:stop].float().mean() > 0.9, (name, kind, tensor)


@contextmanager
def mistakes() -> Iterator[dict[str, tuple[str, Callable[[], Any], set[str]]]]:
    """Wrong exchanges: the method, how to make it wrong, and what must show it."""
    stay_home = lambda self, grads, share, reach: torch.zeros(  # noqa: E731
        len(share.index), grads[0].shape[1], dtype=grads[0].dtype
    )

    nothing = lambda self: torch.zeros(())  # noqa: E731

    def before(self: Any, rows: torch.Tensor, share: Any, reach: Any, way: Any) -> Any:
        # The tokens before a part in the rank's own rows, as if they were those of the batch.
        return [rows[:1].expand(reach.ahead(p), -1) for p in share.layout.held(share.rank)]

    def add(out: Any, lse: Any, more: Any, more_lse: Any) -> None:
        out += more
        lse.copy_(torch.logaddexp(lse, more_lse))

    def unordered(mine: Any, order: Any, *others: Any) -> Any:
        return collect(mine, order, *others)[order.batch_of_packed(mine.device)]

    yield {
        "gradients of keys stay where they are": (
            "all_gather", lambda: patch.object(GatherAll, "send_back", stay_home), {"k", "v"},
        ),
        "gradients of a window's keys stay": (
            "window", lambda: patch.object(SendSeen, "send_back", stay_home), {"k", "v"},
        ),
        "other rows than those before a part": (
            "all_gather", lambda: patch.object(GatherAll, "bring", before), {"out", "q", "k", "v"},
        ),
        "travelling sums are dropped": (
            "ring", lambda: patch.object(RidingSum, "home", nothing), {"k", "v"},
        ),
        "blocks are added without their weights": (
            "ring", lambda: patch.object(ring, "_fold", add), {"out", "q", "k"},
        ),
        "gathered rows stay in the order of ranks": (
            "all_gather", lambda: patch.object(fetch, "collect", unordered), {"out", "q", "k", "v"},
        ),
    }  # fmt: skip


def mistakes_show() -> None:
    """The comparison of ``parity`` fails where something is wrong, and says where."""
    link, case = Link(dist.group.WORLD), Case(sinks=True)
    lengths = (120,) if link.size == 2 else (160,)
    tensors = inputs(case, lengths)
    wanted = defined(case, lengths, tensors)
    share = share_of(lengths, "zigzag", link)
    with mistakes() as all_of_them:
        for name, (method, wrong, shows) in all_of_them.items():
            if "order of ranks" in name and link.size == 2:
                continue  # of two ranks' parts only the last is out of order, which never leaves
            exchange = Exchange(method)  # type: ignore[arg-type]
            with wrong():
                found = fails(lambda e=exchange: split(case, e, share, tensors), wanted)
            assert shows <= set(found), (name, found)
            assert not fails(lambda e=exchange: split(case, e, share, tensors), wanted)


def lost_boundaries_show() -> None:
    """A batch whose documents are taken for one gets another output, by every method."""
    link, case = Link(dist.group.WORLD), Case()
    lengths = BATCHES[link.size]["documents over every cut"]
    tensors = inputs(case, lengths)
    wanted = defined(case, lengths, tensors)
    for name, exchange in exchanges(link.size).items():
        share = whole_as_one(share_of(lengths, "zigzag", link))
        found = fails(lambda e=exchange, s=share: split(case, e, s, tensors), wanted)
        assert {"out", "q", "k", "v"} <= set(found), (name, found)


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


def refusals() -> None:
    """Before anything is sent, each with what would be legal."""
    link = Link(dist.group.WORLD)
    ranks = link.size
    share = share_of((48 * ranks,), "zigzag", link)
    own = {n: share.take(t) for n, t in inputs(Case(heads=9, key_heads=3), (48 * ranks,)).items()
           if n != "sinks"}  # fmt: skip
    q, k, v, scores, kernel = own["q"], own["k"], own["v"], Case().scores(), PlainKernel()
    for exchange in exchanges(ranks).values():
        with pytest.raises(ValueError, match="x: 7 rows; legal on rank .*: 48"):
            attend(q[:7], k, v, share, exchange, scores, kernel)
        with pytest.raises(ValueError, match="9 of queries, 2 of keys, 3 of values; legal: as"):
            attend(q, k[:, :2], v, share, exchange, scores, kernel)
    with pytest.raises(ValueError, match=r"split 9 query heads .* legal for 'ulysses': 1, 3, 9"):
        attend(q, k, v, share, Exchange("ulysses"), scores, kernel)
    legal = "1, 2" if ranks == 2 else "1, 2, 4"
    with pytest.raises(ValueError, match=f"inner_ring: 3 ranks .* {ranks}; legal: {legal}"):
        attend(q, k, v, share, Exchange("double_ring", 3), scores, kernel)
    for method, inner in (("double_ring", None), ("ring", 2)):
        with pytest.raises(ValueError, match=f"inner_ring: {inner} beside method '{method}'"):
            Exchange(method, inner)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"method: 'tree'; legal: {', '.join(METHODS)}"):
        Exchange("tree")  # type: ignore[arg-type]
    assert link.traffic.total() == 0


WITH_GPT_OSS = {"gpt_oss, sliding": ("ring",), "gpt_oss, full": ("ulysses", "ring")}


def layers_of_models() -> None:
    """Attentions as models have them, with rotary positions, norms, sinks, windows or slopes."""
    link, generator = Link(dist.group.WORLD), torch.Generator().manual_seed(0)
    lengths = BATCHES[link.size]["shorter than a share"]
    for name, dim in DIMS.items():
        x, pull = torch.randn(2, sum(lengths), dim, generator=generator, dtype=torch.float64)
        wanted = one_process(name, lengths, x, pull)
        for method, exchange in exchanges(link.size).items():
            # Layers of gpt-oss are large, and one with a window has but one method.
            if "gpt_oss" in name and method not in WITH_GPT_OSS[name]:
                continue
            share = share_of(lengths, "zigzag", link)
            found = several(name, exchange, share, x, pull)
            assert ("sinks" in found) == ("gpt_oss" in name)
            for tensor, error in differences(found, wanted):
                assert error <= 1e-11, (name, method, tensor, error)
            names = {sent for sent, _ in link.traffic.sent}
            link.traffic.reset()
            halo = {"softmax.window", "softmax.window_gradients"}
            assert (names == halo) == ("sliding" in name or method == "window")


CHECKS = {
    "outputs and gradients equal one process": parity,
    "float32 loses no more than its rounding": float32,
    "bfloat16 rounds sums once": bfloat16,
    "documents keep apart": documents_keep_apart,
    "mistakes show": mistakes_show,
    "lost boundaries show": lost_boundaries_show,
    "bytes equal the formulas": volumes,
    "bytes are what the methods promise": published_formulas,
    "unseen blocks are skipped": unseen_blocks_are_skipped,
    "transfers overlap work": transfers_overlap_work,
    "layers of models": layers_of_models,
    "what does not fit is refused": refusals,
}


def run_checks(folder: str) -> None:
    """One rank of all checks: importing torch takes longer than they do."""
    dist.init_process_group("gloo")
    for name, check in CHECKS.items():
        check()
        (Path(folder) / f"{name}.{dist.get_rank()}").touch()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, str]:
    """Folder of what has passed, how many ranks, and the first failure."""
    folder, ranks = tmp_path_factory.mktemp("softmax"), request.param
    try:
        run_ranks(run_checks, ranks, folder, str(folder))
    except AssertionError as failure:
        return folder, ranks, str(failure)
    return folder, ranks, ""


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(check: str, ran: tuple[Path, int, str]) -> None:
    folder, ranks, failure = ran
    assert len(list(folder.glob(f"{check}.*"))) == ranks, failure


def test_what_parts_see_is_what_pairs_of_tokens_see() -> None:
    for lengths, kind, window in product(
        ((96,), (30, 33, 33), (1,) * 50 + (46,), (1, 94, 1)), KINDS, (None, 1, 5, 20, 40, 95)
    ):
        layout = cut_batch(lengths, 3, kind, 1)
        reach = Reach(layout, window)
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        place = torch.arange(len(document))
        seen = (document[:, None] == document) & (place[:, None] >= place)
        seen &= place[:, None] - place < (window or 1000)
        for part, piece in enumerate(layout.parts):
            assert reach.ahead(part) == seen[piece.begin : piece.stop, : piece.begin].any(0).sum()
            assert reach.leaving(part) == seen[piece.stop :, piece.begin : piece.stop].any(0).sum()
            for before in range(part):
                other = layout.parts[before]
                block = seen[piece.begin : piece.stop, other.begin : other.stop]
                assert reach.seen(part, before) == block.any(0).sum()
                assert reach.looking(part, before) == block.any(1).sum()
