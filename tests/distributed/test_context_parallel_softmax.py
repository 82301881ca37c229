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
from components.context_parallel.softmax import fetch, ring
from components.context_parallel.softmax.attend import METHODS, Exchange, attend
from components.context_parallel.softmax.fetch import GatherAll, SendSeen
from components.context_parallel.softmax.kernel import PlainKernel
from components.context_parallel.softmax.reach import Reach
from components.vocabulary.ring import RidingSum
from tests.distributed.softmax_layers import fsdp_and_recompute, layers_of_models
from tests.distributed.softmax_memory import memory_is_as_planned
from tests.distributed.softmax_support import (
    BATCHES,
    CASES,
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
from tests.distributed.softmax_traffic import (
    forwards_are_not_run_again,
    published_formulas,
    transfers_overlap_work,
    unseen_blocks_are_skipped,
    volumes,
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
    stay_home = lambda self, grads, sums, share, reach: [*grads]  # noqa: E731
    home = RidingSum.home
    nothing = lambda self: torch.zeros_like(home(self))  # noqa: E731

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
    with pytest.raises(ValueError, match=r"split 9 query heads; legal for 'ulysses': 1, 3, 9"):
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


def groups_other_than_the_world() -> None:
    """Groups of one rank, in which nothing is sent, and of every other rank."""
    world, rank, case = dist.get_world_size(), dist.get_rank(), Case(sinks=True)
    for step in {world, 2}:
        groups = [dist.new_group(list(range(first, world, step))) for first in range(step)]
        link, lengths = Link(groups[rank % step]), (20 + rank % step, 40, 29)
        tensors = inputs(case, lengths)
        wanted = defined(case, lengths, tensors)
        for kind, (name, exchange) in product(KINDS, exchanges(link.size).items()):
            found = split(case, exchange, share_of(lengths, kind, link), tensors)
            assert_same(f"{name}, {kind}, every {step}", found, wanted)
        assert (link.traffic.total() == 0) == (link.size == 1)


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
    "no forward in backward": forwards_are_not_run_again,
    "memory is as planned": memory_is_as_planned,
    "transfers overlap work": transfers_overlap_work,
    "layers of models": layers_of_models,
    "groups other than the world": groups_other_than_the_world,
    "FSDP and recompute": fsdp_and_recompute,
    "what does not fit is refused": refusals,
}


def run_checks(folder: str) -> None:
    """One rank of all checks."""
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
