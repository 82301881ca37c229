"""Mixers whose sequence is split over ranks against the same mixers in one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from components.context_parallel import dsa
from components.context_parallel.collectives import Link, collect
from components.context_parallel.dsa import dsa_gathered
from components.context_parallel.kda_heads import kda_hidden, kda_projections
from components.context_parallel.kda_state import kda_state
from components.context_parallel.layout import KINDS, cut_batch
from components.context_parallel.share import Share
from components.context_parallel.volume import EXCHANGES, Volume, dsa_volume, kda_volume
from components.models.glm_flash.documents import Documents
from components.models.glm_flash.indexer import Indexer
from components.recompute.layer import RecomputedLayer
from kernels.dsa.pooling import pool_keys
from tests.distributed.context_parallel_support import (
    BATCHES,
    DIM,
    HEAD,
    HEADS,
    INDEX,
    METHODS,
    RANK,
    Residual,
    assert_close,
    differentiate,
    mixer,
    rows,
    share_of,
    split,
    whole,
)
from tests.distributed.spawn import run_ranks
from tests.unit.chunked_support import build
from tests.unit.models_support import tiny_glm

pytestmark = pytest.mark.distributed


def every_case() -> Iterator[tuple[str, str, tuple[int, ...], str]]:
    """Name, method, lengths and kind of every case, in one order on all ranks."""
    for batch, lengths in BATCHES[dist.get_world_size()].items():
        for kind in KINDS:
            for method in METHODS:
                yield f"{method}, {kind}, {batch}", method, lengths, kind


def parity() -> None:
    """Outputs and every gradient; for one batch also where all tokens of a rank are masked."""
    link = Link(dist.group.WORLD)
    for name, method, lengths, kind in every_case():
        share, module = share_of(lengths, kind, link), mixer(method)
        x, pull = rows(sum(lengths), 0), rows(sum(lengths), 1)
        for masked in (False, True) if "every cut" in name else (False,):
            if masked:
                # As labels that are ignored do it: nothing pulls at these outputs.
                pull[share.layout.order.index(1, pull.device)] = 0
            out, grads = whole(module, lengths, x, pull)
            found, sums = split(
                module, lambda y, m=module, s=share, f=method: METHODS[f](m, y, s), share, x, pull
            )
            assert_close(name, found, out, 1e-12)
            assert sums.keys() == grads.keys()
            for parameter, grad in grads.items():
                assert_close(f"{name}, {parameter}", sums[parameter], grad, 1e-11)
                assert (grad is None) == ("indexer" in parameter), parameter


def states_outlive_parts() -> None:
    """Or ``parity`` would not see whether they are passed on."""
    lengths = BATCHES[dist.get_world_size()]["one document"]
    module, x = mixer("kda state"), rows(sum(lengths), 0)
    pull = torch.zeros_like(x)
    # The last two parts of eight, or the last of four.
    pull[-len(x) // 4 :] = 1
    _, grads = whole(module, lengths, x, pull)
    assert grads["x"] is not None
    early, late = (grads["x"][some].norm().item() for some in (slice(8), slice(-8, None)))
    assert early > 1e-3 * late, (early, late)


def float32() -> None:
    """No more is lost than one process loses to rounding."""
    link = Link(dist.group.WORLD)
    lengths = next(iter(BATCHES[link.size].values()))
    for method in METHODS:
        share, module = share_of(lengths, "zigzag", link), mixer(method, torch.float32)
        x, pull = (rows(sum(lengths), seed, torch.float32) for seed in (0, 1))
        # float32 weights in float64, the exact result of which both are roundings.
        exact = mixer(method).double()
        exact.load_state_dict(module.state_dict())
        wanted, wanted_grads = whole(exact, lengths, x.double(), pull.double())
        run = METHODS[method]
        one = whole(module, lengths, x, pull)
        several = split(module, lambda y, m=module, s=share, r=run: r(m, y, s), share, x, pull)
        for name, reference in {"output": wanted, **wanted_grads}.items():
            if reference is None:
                continue
            errors = [
                ((out if name == "output" else grads[name]).double() - reference).norm().item()
                for out, grads in (one, several)
            ]
            allowed = 2 * errors[0] + 1e-6 * max(1, reference.norm().item())
            assert errors[1] <= allowed, (method, name, errors)


def documents_keep_apart() -> None:
    """What happens in one document changes no bit of another's outputs or gradients."""
    link = Link(dist.group.WORLD)
    lengths = next(iter(BATCHES[link.size].values()))
    first, stop = lengths[0], lengths[0] + lengths[1]
    for kind in KINDS:
        for method, run in METHODS.items():
            share, module = share_of(lengths, kind, link), mixer(method)
            results = []
            for change in (0, 3):
                x, pull = rows(sum(lengths), 0), rows(sum(lengths), 1)
                x[first:stop] += change * rows(stop - first, 2)
                pull[first:stop] *= 1 + change
                run_share = lambda y, m=module, s=share, r=run: r(m, y, s)  # noqa: E731
                out, grads = split(module, run_share, share, x, pull)
                results.append((out, grads["x"]))
            for before, after in zip(*results, strict=True):
                changed = (before != after).any(-1)
                assert not changed[:first].any() and not changed[stop:].any(), (method, kind)
                assert changed[first:stop].all(), (method, kind)


def gates_in_the_order_of_ranks(indexer: Indexer, x: torch.Tensor, share: Share) -> torch.Tensor:
    """The mistake that gathering keys and gates apart invites: only the keys are reordered."""
    order, size = share.layout.order, indexer.config.kpool
    keys = collect(indexer.k_norm(indexer.wk(x)), order, share.link, "test")
    gates = collect(F.linear(x, indexer.compress_gate), order, share.link, "test")
    gates = gates[order.batch_of_packed(x.device)]
    first = share.documents.pools(size).first
    return pool_keys(keys, gates, indexer.compress_ape, first)


def gates_that_are_not_reordered_show() -> None:
    """The comparison of ``parity`` fails for wrong pool gates, and only then."""
    link = Link(dist.group.WORLD)
    lengths = (96,) if link.size == 2 else (128,)
    module, right = mixer("dsa"), dsa.pooled_keys
    x, pull = rows(sum(lengths), 0), rows(sum(lengths), 1)
    out, _ = whole(module, lengths, x, pull)
    for kind, differs in (("zigzag", True), ("contiguous", False)):
        share = share_of(lengths, kind, link)
        dsa.pooled_keys = gates_in_the_order_of_ranks
        try:
            found, _ = split(module, lambda y, s=share: dsa_gathered(module, y, s), share, x,
                             pull)  # fmt: skip
        finally:
            dsa.pooled_keys = right
        if differs:
            with pytest.raises(AssertionError):
                assert_close("output", found, out, 1e-12)
        else:
            assert_close("output", found, out, 1e-12)


def mixers_in_a_row() -> None:
    """Backward through several exchanges keeps their order on all ranks."""
    link = Link(dist.group.WORLD)
    lengths = BATCHES[link.size]["shorter than a share"]
    modules = {method: mixer(method) for method in METHODS}
    stack, documents = nn.ModuleDict(modules), Documents.from_lengths(lengths)
    share = share_of(lengths, "zigzag", link)
    x, pull = rows(sum(lengths), 0), rows(sum(lengths), 1)

    def together(y: torch.Tensor) -> torch.Tensor:
        for module in modules.values():
            y = y + module(y.unsqueeze(0), documents).squeeze(0)
        return y

    def apart(y: torch.Tensor) -> torch.Tensor:
        for method, module in modules.items():
            y = y + METHODS[method](module, y, share)
        return y

    out, grads = differentiate(stack, together, x, pull)
    found, sums = split(stack, apart, share, x, pull)
    assert_close("output", found, out, 1e-11)
    for name, grad in grads.items():
        assert_close(name, sums[name], grad, 1e-9)


def fsdp_and_recompute() -> None:
    """FSDP sums the ranks' shares of gradients; a second forward in backward keeps the order."""
    link = Link(dist.group.WORLD)
    lengths = BATCHES[link.size]["shorter than a share"]
    plain = nn.ModuleList(Residual(method) for method in METHODS)
    share, documents = share_of(lengths, "zigzag", link), Documents.from_lengths(lengths)
    x, pull = rows(sum(lengths), 0), rows(sum(lengths), 1)

    def together(y: torch.Tensor) -> torch.Tensor:
        for layer in plain:
            y = y + layer.mixer(y.unsqueeze(0), documents).squeeze(0)
        return y

    out, grads = differentiate(plain, together, x, pull)
    layers = nn.ModuleList(RecomputedLayer(Residual(method)) for method in METHODS)
    mesh = init_device_mesh("cpu", (link.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
        # As torchtitan does: the loss is divided by all ranks' tokens already.
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)

    def apart(y: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            y = layer(y, share)
        return y

    found, sums = differentiate(layers, apart, share.take(x), share.take(pull))
    assert_close("output", found, share.take(out), 1e-11)
    assert_close("x", sums["x"], share.take(grads["x"]), 1e-9)
    for name, grad in grads.items():
        if name != "x" and grad is not None:
            place, _, rest = name.partition(".")
            sharded = layers[int(place)].get_parameter(f"_checkpoint_wrapped_module.{rest}").grad
            assert_close(name, sharded.full_tensor(), grad, 1e-9)
    # States were passed on once; hidden states were gathered again.
    sent = link.traffic.sent
    assert sent["kda.states", "forward"] == sent["kda.states", "backward"]
    assert sent["kda.hidden", "forward"] == 2 * sent["kda.hidden", "backward"]


def groups_other_than_the_world() -> None:
    """Groups of one rank, in which nothing is sent, and of every other rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in {world, 2}:
        groups = [dist.new_group(list(range(first, world, step))) for first in range(step)]
        link, lengths = Link(groups[rank % step]), (20 + rank % step, 40, 29)
        for kind in KINDS:
            for method, run in METHODS.items():
                share, module = share_of(lengths, kind, link), mixer(method)
                x, pull = rows(sum(lengths), rank % step), rows(sum(lengths), 9)
                out, grads = whole(module, lengths, x, pull)
                run_share = lambda y, m=module, s=share, r=run: r(m, y, s)  # noqa: E731
                found, sums = split(module, run_share, share, x, pull)
                assert_close(method, found, out, 1e-12)
                for name, grad in grads.items():
                    assert_close(f"{method}, {name}", sums[name], grad, 1e-11)
        assert (link.traffic.total() == 0) == (link.size == 1)


def sent_bytes(method: str, lengths: tuple[int, ...], dtype: torch.dtype) -> dict[Any, int]:
    link = Link(dist.group.WORLD)
    share, module = share_of(lengths, "zigzag", link), mixer(method, dtype)
    x = share.take(rows(sum(lengths), 0, dtype)).requires_grad_()
    METHODS[method](module, x, share).sum().backward()
    return dict(link.traffic.sent)


def by_direction(sent: dict[Any, int], without: str = "") -> Volume:
    return Volume(
        *(sum(n for (name, d), n in sent.items() if d == direction and name != without)
          for direction in ("forward", "backward"))
    )  # fmt: skip


def volumes() -> None:
    """Bytes in either direction equal the formulas, for equal shares; halos by themselves."""
    count, rank = dist.get_world_size(), dist.get_rank()
    lengths, own = (48 * count,), 48
    for dtype in (torch.float32, torch.bfloat16):
        e = dtype.itemsize
        for exchange in EXCHANGES:
            sent = sent_bytes(f"kda {exchange}", lengths, dtype)
            expected = kda_volume(
                exchange, tokens=own, ranks=count, dim=DIM, heads=HEADS, head_dim=HEAD,
                element_size=e,
            )  # fmt: skip
            assert by_direction(sent, without="kda.halo") == expected, exchange
        owners = cut_batch(lengths, count, "zigzag").owners
        sent = sent_bytes("kda state", lengths, dtype)
        # To whom a part's last tokens go, and from whom its own first ones came.
        sends = sum(a == rank != b for a, b in zip(owners, owners[1:], strict=False))
        receives = sum(b == rank != a for a, b in zip(owners, owners[1:], strict=False))
        assert sent["kda.halo", "forward"] == sends * 3 * DIM * e
        assert sent["kda.halo", "backward"] == receives * 3 * DIM * e
        sent = sent_bytes("dsa", lengths, dtype)
        assert by_direction(sent) == dsa_volume(
            tokens=own, ranks=count, kv_rank=RANK, index_dim=INDEX, pool=4, element_size=e
        )
        assert sent["dsa.index_keys", "forward"] == own // 4 * INDEX * e * (count - 1)
    assert not sent_bytes("kda state", (24,) * (2 * count), torch.float32)
    check_ratio(count, lengths)


def check_ratio(count: int, lengths: tuple[int, ...]) -> None:
    """Heads are twice as wide as hidden states, as in the published model."""
    sent = [
        sum(
            n for (_, d), n in sent_bytes(method, lengths, torch.bfloat16).items() if d == "forward"
        )
        for method in ("kda projections", "kda hidden")
    ]
    assert sent[0] / sent[1] > {2: 2.4, 4: 1.6}[count]


def refusals() -> None:
    """Before anything is sent, each with what would be legal."""
    link = Link(dist.group.WORLD)
    count = link.size
    share = share_of((48 * count,), "zigzag", link)
    for method, run in METHODS.items():
        with pytest.raises(ValueError, match="x: 7 rows; legal on rank .*: 48"):
            run(mixer(method), rows(7, 0), share)
    module = build(tiny_glm(dim=DIM, kda_heads=3, kda_head_dim=8).build_spec().model.layers[0]
                   .attention)  # fmt: skip
    for run in (kda_hidden, kda_projections):
        with pytest.raises(ValueError, match=r"split 3 heads \(model.kda_heads\); legal: 1, 3"):
            run(module, rows(48, 0), share)
    layout, documents = cut_batch((48 * count,), count, align=2), share.documents
    with pytest.raises(ValueError, match="pools of 4 .* legal: multiples of 4"):
        dsa_gathered(mixer("dsa"), rows(48, 0), Share(layout, documents, link))
    layout = cut_batch((4 * count,), count, "contiguous", align=1)
    short = Share(layout, Documents.from_lengths((4 * count,)), link)
    wide = build(tiny_glm(dim=DIM, conv_kernel=6).build_spec().model.layers[0].attention)
    with pytest.raises(ValueError, match="parts of 4 tokens .* 5 back .* legal: .* 5 or more"):
        kda_state(wide, rows(4, 0), short)
    with pytest.raises(ValueError, match="cut for 1 ranks"):
        Share(cut_batch((96,), 1), Documents.from_lengths((96,)), link)
    with pytest.raises(ValueError, match="2 of 96 tokens beside a layout of 1 of 96"):
        Share(cut_batch((96,), count), Documents.from_lengths((48, 48)), link)


CHECKS = {
    "outputs and every gradient equal one process": parity,
    "states outlive parts": states_outlive_parts,
    "float32 loses no more than its rounding": float32,
    "documents keep apart": documents_keep_apart,
    "pool gates that are not reordered show": gates_that_are_not_reordered_show,
    "mixers in a row": mixers_in_a_row,
    "FSDP and recompute": fsdp_and_recompute,
    "groups other than the world": groups_other_than_the_world,
    "bytes equal the formulas": volumes,
    "what does not fit is refused": refusals,
}


def run_checks(folder: str) -> None:
    """One rank of all checks."""
    dist.init_process_group("gloo")
    for name, check in CHECKS.items():
        check()
        (Path(folder) / f"{name}.{dist.get_rank()}").touch()


def run_on(ranks: int, folder: Path) -> tuple[Path, int, str]:
    """Folder of what has passed, how many ranks, and the first failure."""
    try:
        run_ranks(run_checks, ranks, folder, str(folder))
    except AssertionError as failure:
        return folder, ranks, str(failure)
    return folder, ranks, ""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, str]:
    return run_on(request.param, tmp_path_factory.mktemp("context_parallel"))


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(check: str, ran: tuple[Path, int, str]) -> None:
    folder, ranks, failure = ran
    assert len(list(folder.glob(f"{check}.*"))) == ranks, failure
