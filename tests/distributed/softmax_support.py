"""Softmax attention by its definition, and with its sequence split over ranks, for tests."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from components.context_parallel.collectives import Link, collect
from components.context_parallel.layout import cut_batch
from components.context_parallel.share import Share
from components.context_parallel.softmax.attend import Exchange, attend
from components.context_parallel.softmax.kernel import Block, Kernel, PlainKernel, Scores
from components.models.glm_flash.documents import Documents

WIDTH, VALUE = 6, 4
BATCHES = {
    2: {
        "documents over every cut": (30, 33, 33),
        "one document": (96,),
        "shorter than a share": (5, 61, 30),
        "ragged total": (1, 41, 2, 50, 7),
        "cut between documents": (24, 24, 24, 24),
        "one-token documents": (1,) * 50 + (46,),
        "one token goes on": (1, 94, 1),
    },
    4: {
        "documents over every cut": (45, 50, 33),
        "one document": (128,),
        "shorter than a share": (5, 90, 3, 1, 29),
        "ragged total": (1, 70, 2, 58, 5),
        "one-token documents": (1,) * 60 + (70,),
    },
}
Tensors = dict[str, torch.Tensor]


def exchanges(ranks: int) -> dict[str, Exchange]:
    found = {m: Exchange(m) for m in ("ulysses", "all_gather", "ring", "window")}  # type: ignore[arg-type]
    for width in (1, 2, 4):
        if ranks % width == 0:
            found[f"double_ring {width}"] = Exchange("double_ring", width)
    return found


@dataclass(frozen=True)
class Case:
    """A layer: heads, what it makes of its scores, and whether it has sinks."""

    heads: int = 4
    key_heads: int = 2
    window: int | None = None
    sinks: bool = False
    alibi: bool = False

    def scores(self) -> Scores:
        slopes = 2.0 ** -torch.arange(1, self.heads + 1) if self.alibi else None
        return Scores(0.5, self.window, slopes)

    def fits(self, exchange: Exchange, ranks: int) -> bool:
        return exchange.method != "ulysses" or self.heads % ranks == 0


# A window smaller than a part, one longer than any, and one of the token alone.
CASES = {
    "grouped": Case(),
    "one key head": Case(key_heads=1, sinks=True),
    "as many key heads": Case(key_heads=4, alibi=True),
    "small window": Case(window=5, sinks=True),
    "wide window": Case(key_heads=1, window=50, alibi=True),
    "window of one": Case(window=1),
    "odd heads": Case(heads=5, key_heads=1, sinks=True, alibi=True),
    "three key heads": Case(heads=12, key_heads=3, window=30),
}


def inputs(case: Case, lengths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensors:
    """q, k, v, what pulls at the output ("pull"), and sinks."""
    generator = torch.Generator().manual_seed(case.heads + sum(lengths))
    tokens = sum(lengths)
    shapes = {
        "q": (tokens, case.heads, WIDTH),
        "k": (tokens, case.key_heads, WIDTH),
        "v": (tokens, case.key_heads, VALUE),
        "pull": (tokens, case.heads, VALUE),
        "sinks": (case.heads,),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def defined(case: Case, lengths: tuple[int, ...], tensors: Tensors) -> Tensors:
    """Output and gradients by one process, from a dense mask, by autograd."""
    q, k, v, sinks = (tensors[n].clone().requires_grad_() for n in ("q", "k", "v", "sinks"))
    scores, groups = case.scores(), case.heads // case.key_heads
    keys, values = (t.repeat_interleave(groups, 1) for t in (k, v))
    found = torch.einsum("qnh,knh->nqk", q, keys) * scores.scale
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(document))
    distance = place[:, None] - place
    if scores.slopes is not None:
        found = found - scores.slopes[:, None, None] * distance
    seen = (distance >= 0) & (document[:, None] == document)
    if case.window is not None:
        seen &= distance < case.window
    found = found.masked_fill(~seen, -math.inf)
    out = torch.einsum("nqk,knh->qnh", found.softmax(-1), values)
    lse = found.logsumexp(-1).t()
    return differentiate(case, out, lse, q, k, v, sinks, tensors["pull"])


def alone(case: Case, lengths: tuple[int, ...], tensors: Tensors) -> Tensors:
    """The same by one process, in the arithmetic of the plain kernel."""
    q, k, v, sinks = (tensors[n].clone().requires_grad_() for n in ("q", "k", "v", "sinks"))
    block = Block(Documents.from_lengths(lengths).start, 0, 0, len(q))
    out, lse = PlainKernel().attend(q, k, v, block, case.scores())
    return differentiate(case, out, lse, q, k, v, sinks, tensors["pull"])


def differentiate(
    case: Case, out: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, sinks: torch.Tensor, pull: torch.Tensor,
) -> Tensors:  # fmt: skip
    if case.sinks:
        assert lse is not None
        out = out * torch.sigmoid(lse - sinks).unsqueeze(-1).to(out.dtype)
    out.backward(pull)
    found = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
    if case.sinks:
        found["sinks"] = sinks.grad
    return {name: t for name, t in found.items() if t is not None}


def split(
    case: Case, exchange: Exchange, share: Share, tensors: Tensors,
    kernel: Kernel | None = None,
) -> Tensors:  # fmt: skip
    """The same by all ranks, in the order of the batch; sinks' gradients summed."""
    own = {n: share.take(t).clone() for n, t in tensors.items() if n != "sinks"}
    q, k, v = (own[n].requires_grad_() for n in ("q", "k", "v"))
    sinks = tensors["sinks"].clone().requires_grad_()
    out, lse = attend(
        q, k, v, share, exchange, case.scores(), kernel or PlainKernel(), need_lse=case.sinks
    )
    found = differentiate(case, out, lse, q, k, v, sinks, own["pull"])
    order, link = share.layout.order, Link(share.link.group)
    whole = {n: collect(t, order, link, "test") for n, t in found.items() if n != "sinks"}
    if case.sinks:
        dist.all_reduce(found["sinks"], group=link.group)
        whole["sinks"] = found["sinks"]
    return whole


def share_of(lengths: tuple[int, ...], kind: Any, link: Link, align: int = 4) -> Share:
    layout = cut_batch(lengths, link.size, kind, align)
    return Share(layout, Documents.from_lengths(lengths), link)


def differences(found: Tensors, wanted: Tensors) -> Iterator[tuple[str, float]]:
    """Of each tensor, the largest difference as a share of its largest element, or of 1."""
    assert found.keys() == wanted.keys()
    for name, reference in wanted.items():
        error = (found[name].double() - reference.double()).abs().max().item()
        yield name, error / max(reference.abs().max().item(), 1)


def assert_same(name: str, found: Tensors, wanted: Tensors) -> None:
    for tensor, error in differences(found, wanted):
        assert error <= (1e-12 if tensor == "out" else 1e-11), f"{name}, {tensor}: {error:.1e}"


def fails(run: Callable[[], Tensors], wanted: Tensors) -> list[str]:
    """Which tensors a wrong exchange gets wrong."""
    return [name for name, error in differences(run(), wanted) if not error <= 1e-6]


def whole_as_one(share: Share) -> Share:
    """The mistake of a batch whose boundaries are lost: all tokens in one document."""
    lost = replace(share.documents, start=torch.zeros_like(share.documents.start))
    return Share(share.layout, lost, share.link)
