"""The indexer's scores and choice of pools, over all or a stated share of a document's queries.

Shapes: queries [Q, H, D], weights [Q, H], keys [P, D], P = T / 4 pools of one document of T tokens;
K pools are chosen. Where Q is below T, the queries are ``PARTS`` runs of consecutive tokens, one in
the middle of each 1/``PARTS`` of the document: they see half of the pools on average, as all do.
The figures are those of the Q queries, not scaled up.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.dsa import select as plain
from kernels.dsa.pooling import Pools
from kernels.indexer import fp8, op
from kernels.precision import mm_accumulate
from tests.benchmarks import indexer_peers as peers
from tests.benchmarks.case import Case, Outputs, Runnable, Size, Variant
from tests.benchmarks.indexer_inputs import POOL, SCALE, Inputs, make_inputs, runs
from tests.benchmarks.machine import Floor, Machine, roofline
from tests.benchmarks.probes import Device

_PEER_BYTES = 2**31


def _ids(inputs: Inputs, choose: Callable[..., torch.Tensor]) -> Outputs:
    """Chosen pools [Q, K], run by run."""
    device, found = inputs.keys.device, []
    for part, begin in enumerate(inputs.begins):
        rows = slice(part * inputs.run, (part + 1) * inputs.run)
        position = torch.arange(begin, begin + inputs.run, device=device)
        found.append(
            choose(
                inputs.queries[rows], inputs.weights[rows], inputs.keys, inputs.pools, position,
                inputs.lengths, size=POOL, count=inputs.count, scale=SCALE, begin=begin,
            )
        )  # fmt: skip
    return {"ids": torch.cat(found) if len(found) > 1 else found[0]}


def reference(inputs: Inputs) -> Outputs:
    """Chosen by scores in float64."""

    def choose(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *args, **kwargs):
        return plain.select_pools(
            queries.double(), weights.double(), keys.double(), *args, **kwargs
        ).double()

    return _ids(inputs, choose)


def tolerance(size: Size) -> dict[str, float]:
    """None for ours: at the gate every score is exact, so the choice has to be. But in fp8, which
    is judged by the pools that it misses among normal numbers."""
    return {**peers.TOLERANCE, "missed": 0.06}


def floor(size: Size, machine: Machine) -> Floor:
    """The products of each query with the pools it may choose; all operands moved once."""
    t, q, h, d, k = (size.shape[key] for key in "TQHDK")
    begins, run = runs(t, q)
    pairs = sum((token + 1) // POOL for begin in begins for token in range(begin, begin + run))
    width = getattr(torch, size.dtype).itemsize
    return roofline(
        machine,
        dtype=size.dtype,
        flops=2.0 * pairs * h * d,
        flops_text=f"{q} of {t} queries: 2 x {pairs} open pairs x {h} heads x {d}",
        nbytes=float(width * (q * h * d + t // POOL * d) + 4 * q * (h + k)),
        bytes_text=f"queries, keys, weights, ids: {width} B x ({q} x {h} x {d} + {t // POOL} x {d})"
        f" + 4 B x {q} x ({h} + {k})",
    )


def _kernels(inputs: Inputs, device: Device) -> Runnable:
    return Runnable(call=lambda: _ids(inputs, op.select_pools))


def _choose_in_fp8(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *args, rotate: bool, **kwargs
) -> torch.Tensor:
    """Rounded within the time, keys again for each run of queries."""
    rounded = fp8.in_fp8(queries, weights, keys, rotate)
    return op.select_pools(*rounded[:3], *args, key_factors=rounded.key_factors, **kwargs)


def _fp8(rotate: bool) -> Variant:
    def choose(inputs: Inputs) -> Outputs:
        return _ids(inputs, partial(_choose_in_fp8, rotate=rotate))

    def missed(inputs: Inputs, outputs: Outputs) -> dict[str, float]:
        """Of as many normal numbers: the share of pools that full precision chooses and fp8 does
        not, over queries that may choose from twice as many and more."""
        random = torch.Generator(device=inputs.keys.device).manual_seed(0)
        inputs = replace(
            inputs,
            queries=torch.empty_like(inputs.queries).normal_(generator=random),
            weights=torch.empty_like(inputs.weights).normal_(generator=random),
            keys=torch.empty_like(inputs.keys).normal_(generator=random),
        )
        wanted, found = _ids(inputs, op.select_pools)["ids"], choose(inputs)["ids"]
        tokens = torch.cat([torch.arange(b, b + inputs.run) for b in inputs.begins])
        many = (tokens + 1 >= 2 * POOL * inputs.count).to(found.device)
        total = int(many.sum()) * inputs.count
        # Without such queries nothing is shown.
        return {"missed": 1 - int(fp8.chosen_of(found[many], wanted[many])) / max(1, total)}

    return Variant(
        name="kernels, fp8, turned" if rotate else "kernels, fp8",
        role="ours",
        build=lambda inputs, device: Runnable(call=lambda: choose(inputs)),
        requires=("triton",),
        devices=("cuda",),
        dtypes=("bfloat16",),
        check=missed,
    )


def _plain(inputs: Inputs, device: Device) -> Runnable:
    return Runnable(call=lambda: _ids(inputs, plain.select_pools))


def _torch_choose(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, pools: Pools,
    position: torch.Tensor, lengths: tuple[int, ...], *, size: int, count: int, scale: float,
    begin: int,
) -> torch.Tensor:  # fmt: skip
    """Products in the operands' dtype with float32 sums, 512 queries at a time if they fit."""
    found = []
    heads = queries.shape[1]
    step = max(1, min(512, _PEER_BYTES // (4 * heads * len(keys))))
    for q0 in range(0, len(queries), step):
        part, end = queries[q0 : q0 + step], (position[q0 : q0 + step] + 1) // size
        last = max(1, (begin + q0 + len(part)) // size)
        products = mm_accumulate(part.flatten(0, 1), keys[:last].t())
        products = products.mul_(scale).relu_().view(len(part), heads, last)
        scores = torch.bmm(weights[q0 : q0 + step].unsqueeze(1), products).squeeze(1)
        allowed = torch.arange(last, device=keys.device) < end.unsqueeze(1)
        best = plain.best_pools(scores, allowed, count)
        found.append(plain.compact(best, torch.zeros_like(end), min(count, len(keys))))
    return torch.cat(found)


def _peer(inputs: Inputs, device: Device) -> Runnable:
    return Runnable(call=lambda: _ids(inputs, _torch_choose))


def too_long(size: Size) -> str:
    """Why products in full precision are not run at this size."""
    queries, tokens = size.shape["Q"], size.shape["T"]
    long = queries * tokens > 2**35
    return f"left out, 6 s and more per call at {queries} queries of {tokens}" if long else ""


def _size(tokens: int, queries: int) -> Size:
    return Size(
        shape={"T": tokens, "Q": queries, "H": 32, "D": 128, "K": 512},
        dtype="bfloat16",
        devices=("cuda",),
    )


def _example(
    name: str,
    build: Callable[..., Runnable],
    check: Callable[[Inputs, Outputs], dict[str, float]],
    files: tuple[str, ...],
) -> Variant:
    return Variant(
        name=f"tilelang_example, {name}",
        role="peer",
        build=build,
        requires=("tilelang",),
        files=files,
        devices=("cuda",),
        dtypes=("bfloat16",),
        check=check,
    )


CASE = Case(
    name="indexer",
    question="What do exact scores and an exact top-512 of the pools cost?",
    sizes={
        "small": Size(shape={"T": 1500, "Q": 1500, "H": 4, "D": 32, "K": 32}, dtype="float32"),
        "32k": _size(2**15, 2**15),
        "128k": _size(2**17, 2**17),
        "1m": _size(2**20, 2**16),
    },
    inputs=make_inputs,
    reference=reference,
    tolerance=tolerance,
    floor=floor,
    variants=(
        Variant(
            name="kernels", role="ours", build=_kernels, requires=("triton",), devices=("cuda",)
        ),
        _fp8(rotate=True),
        _fp8(rotate=False),
        Variant(name="plain torch, full precision", role="ours", build=_plain, unfit=too_long),
        Variant(name="plain torch, low-precision products", role="peer", build=_peer),
        _example("fp8 scores, no choice", peers.scores, peers.check_scores, peers.SCORE_FILES),
        _example("fp8 scores, radix", peers.selection, peers.check_selection, peers.SELECT_FILES),
    ),
)
