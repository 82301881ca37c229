"""The vocabulary loss on a ring of GPUs that each have tokens of their own, beside Liger.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.vocabulary_ring --size a

Ours keeps 1 / ranks of the head on each rank. Liger stands for a replicated head: it needs all of
it and all of its gradient. ``liger`` is given both for nothing; ``liger_gathered`` gets the head as
FSDP2 would hand it over, gathered before and its gradient summed and scattered after, in the dtype
that Liger adds it up in. Every variant is checked against the closed form first. Times are of the
slowest rank, with a barrier before each call; variants take turns. Peaks are of the fullest rank,
with nothing on the device but what the variant needs.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from components.titan.device import resolve_device
from components.vocabulary.fused import fused
from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.move_activations import move_activations
from components.vocabulary.move_weights import move_weights
from tests.benchmarks.case import Outputs, Role, Size
from tests.benchmarks.cases import chunked_loss
from tests.benchmarks.cases.chunked_loss import IGNORED, Inputs
from tests.benchmarks.cases.vocabulary_loss import CASE
from tests.benchmarks.harness import relative_error
from tests.benchmarks.probes import Device, Probe, make_probe
from tests.benchmarks.ranks import Progress, highest, ranks_heading, start_ranks
from tests.benchmarks.training import RESULTS, publish, settled_machine

_GIB = 2**30

HANG_SECONDS = 600
"""After which ranks that wait for one that failed end as well."""


class Operands:
    """One rank's tokens; the head, of which a variant brings to the device what it touches.

    Attributes:
        hidden: (N, H).
        labels: int64 (N,), none ignored.
        count: float32, N.
        total: float32, tokens of all ranks.
    """

    def __init__(self, inputs: Inputs, host_weight: torch.Tensor, total: torch.Tensor) -> None:
        self.hidden, self.labels = inputs.hidden[0], inputs.labels[0]
        self.count, self.total = inputs.valid, total
        self.group = dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.layout = VocabularyLayout(len(host_weight), self.ranks, self.ranks)
        self._host_weight = host_weight

    @property
    def rows(self) -> slice:
        """This rank's rows of the head."""
        shard = self.layout.shard(self.rank)
        return slice(shard.start, shard.stop)

    @cached_property
    def whole(self) -> torch.Tensor:
        return self._host_weight.to(self.hidden.device)

    @cached_property
    def shard(self) -> torch.Tensor:
        return self._host_weight[self.rows].to(self.hidden.device)


@dataclass(frozen=True)
class Variant:
    """One way to compute a rank's loss and gradients.

    Attributes:
        call: operands -> "loss", "dX", "dW".
        dw: what dW is of: all ranks' tokens, for this rank's ``shard`` of the head, or ``mine``,
            this rank's tokens, for all of it.
        mean_over: which tokens the loss is a mean over, and the gradients are of that mean.
        requires: a package; where it is missing the variant is left out.
    """

    name: str
    role: Role
    call: Callable[[Operands], Outputs]
    dw: Literal["shard", "mine"]
    mean_over: Literal["total", "count"]
    requires: str | None = None


def _fused(operands: Operands, rows: int) -> Outputs:
    o = operands
    dw = torch.zeros_like(o.shard, dtype=torch.float32)
    arguments = o.hidden, o.shard, o.labels, o.layout, o.group
    loss, dx = fused(*arguments, scale=o.total.reciprocal(), rows=rows, dw=dw)
    assert dx is not None
    return {"loss": loss / o.total, "dX": dx, "dW": dw}


def _moved(operands: Operands, move: Callable[..., Any], rows: int) -> Outputs:
    o, x = operands, operands.hidden.detach().requires_grad_()
    dw = torch.zeros_like(o.shard, dtype=torch.float32)
    log_p, _ = move(x, o.shard, o.labels, o.layout, o.group, rows=rows, dw=dw)
    loss = -log_p.sum() / o.total
    loss.backward()
    assert x.grad is not None
    return {"loss": loss.detach(), "dX": x.grad, "dW": dw}


def _liger(operands: Operands, accumulate: torch.dtype | None) -> Outputs:
    return _liger_with(operands.whole, operands, accumulate)


def _liger_gathered(operands: Operands, accumulate: torch.dtype | None) -> Outputs:
    o = operands
    whole = torch.empty(o.layout.vocabulary, o.shard.shape[1], dtype=o.shard.dtype, device="cuda")
    dist.all_gather_single(whole, o.shard)
    outputs = _liger_with(whole, o, accumulate)
    dw = torch.empty_like(o.shard, dtype=outputs["dW"].dtype)
    dist.reduce_scatter_single(dw, outputs["dW"])
    return {**outputs, "dW": dw}


def _liger_with(
    weight: torch.Tensor, operands: Operands, accumulate: torch.dtype | None
) -> Outputs:  # fmt: skip
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    x, w = operands.hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED, reduction="mean", accum_dtype=accumulate
    )(w, x, operands.labels)
    loss.backward()
    assert x.grad is not None and w.grad is not None
    return {"loss": loss.detach(), "dX": x.grad, "dW": w.grad}


def _variants() -> list[Variant]:
    def ours(name: str, call: Callable[..., Outputs], **settings: object) -> Variant:
        return Variant(name, "ours", partial(call, **settings), "shard", "total")

    def liger(name: str, call: Callable[..., Outputs], dw: Any, accumulate: object) -> Variant:
        bound = partial(call, accumulate=accumulate)
        return Variant(name, "peer", bound, dw, "count", "liger_kernel")

    wide = torch.float32
    return [
        *(ours(f"fused_{rows}", _fused, rows=rows) for rows in (2048, 4096, 8192)),
        ours("move_weights_4096", _moved, move=move_weights, rows=4096),
        ours("move_activations_4096", _moved, move=move_activations, rows=4096),
        liger("liger", _liger, "mine", None),
        liger("liger_fp32_dw", _liger, "mine", wide),
        liger("liger_gathered", _liger_gathered, "shard", None),
        liger("liger_gathered_fp32_dw", _liger_gathered, "shard", wide),
    ]


def main(arguments: Sequence[str]) -> int:
    """One rank of the measurement; rank 0 prints and writes. Returns 1 if a result was wrong."""
    options = _parser().parse_args(arguments)
    device = resolve_device(options.device)
    start_ranks(device, HANG_SECONDS)
    try:
        size = CASE.sizes[options.size]
        machine = settled_machine(device)
        figures = measure(size, make_probe(device), options)
        record = {
            **ranks_heading("vocabulary_ring", options, arguments, machine),
            "size": asdict(size),
            # As many products as if a rank had the head alone.
            "floor": asdict(chunked_loss.floor(size, machine)),
            "variants": figures,
        }
        if dist.get_rank() == 0:
            stem = options.out / f"{options.name}_{record['ranks']}x{machine.slug}_{options.size}"
            publish(stem, record, markdown(record))
        return int(any(figure["reason"] for figure in figures if figure["role"] == "ours"))
    finally:
        dist.destroy_process_group()


def measure(size: Size, probe: Probe, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Check, read memory, take turns. Collective; every rank gets the same figures.

    Args:
        size: of one rank: N is its own tokens.
        probe: of this rank's device.
        options: ``repeats``, ``warmup`` and ``seed``.

    Returns:
        A record of each variant: ``reason`` says why it has no ``times_ms``.
    """
    say = Progress(time.monotonic()).say
    inputs, host_weight, total = _inputs(size, probe.device, options.seed)
    say("inputs drawn; comparing results")
    figures = [
        {"name": v.name, "role": v.role, "reason": "", "errors": {}, "times_ms": []}
        for v in _variants()
    ]
    alive = []
    for variant, figure in zip(_variants(), figures, strict=True):
        if variant.requires and importlib.util.find_spec(variant.requires) is None:
            figure["reason"] = f"not installed: needs {variant.requires}"
        else:
            alive.append((variant, figure))
    _gate(alive, Operands(inputs, host_weight, total), inputs, chunked_loss.tolerance(size))
    alive = [(variant, figure) for variant, figure in alive if not figure["reason"]]
    for variant, figure in alive:
        own = Operands(inputs, host_weight, total)
        variant.call(own)  # what is loaded and compiled once is no part of the peak
        memory = probe.memory(partial(variant.call, own))
        figure["peak_bytes"] = int(highest(memory.peak))
        say(f"{variant.name}: peak {figure['peak_bytes'] / _GIB:.2f} GiB")
        del own
    shared = Operands(inputs, host_weight, total)
    for turn in range(-options.warmup, options.repeats):
        for variant, figure in alive:
            probe.flush()
            dist.barrier()
            elapsed = highest(probe.time_ms(partial(variant.call, shared)))
            if turn >= 0:
                figure["times_ms"].append(elapsed)
        if turn >= 0:
            times = (f"{figure['name']} {figure['times_ms'][-1]:.4g} ms" for _, figure in alive)
            say(f"round {turn + 1} of {options.repeats}: {', '.join(times)}")
    return figures


def _inputs(size: Size, device: Device, seed: int) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """This rank's tokens with the head left out; the head on the host; tokens of all ranks."""
    inputs = chunked_loss.make_inputs(size, device, seed + dist.get_rank(), "timing")
    dist.broadcast(inputs.weight, 0)
    total = inputs.valid.clone()
    dist.all_reduce(total)
    host_weight = inputs.weight.cpu()
    inputs.weight = inputs.weight.new_empty(0)
    return inputs, host_weight, total


def _gate(
    alive: list[tuple[Variant, dict[str, Any]]],
    operands: Operands,
    inputs: Inputs,
    tolerance: Any,
) -> None:
    """Fill in errors against the closed form, and why a variant is not timed."""
    own = chunked_loss.reference(
        Inputs(
            hidden=inputs.hidden, weight=operands.whole, labels=inputs.labels, valid=inputs.valid
        )
    )
    summed = own["dW"].clone()
    dist.all_reduce(summed)
    of_shard = summed[operands.rows].clone()
    del summed
    for variant, figure in alive:
        outputs = variant.call(operands)
        # The reference divides by this rank's tokens.
        factor = operands.count / operands.total if variant.mean_over == "total" else 1.0
        expected = {
            "loss": own["loss"] * factor,
            "dX": own["dX"][0] * factor,
            "dW": (of_shard if variant.dw == "shard" else own["dW"]) * factor,
        }
        for name, value in expected.items():
            figure["errors"][name] = highest(relative_error(outputs[name], value))
        bad = [n for n, e in figure["errors"].items() if e > tolerance[n]]
        if bad:
            figure["reason"] = f"wrong: {', '.join(bad)}"


def markdown(record: dict[str, Any]) -> str:
    """The table, with ratios to Liger on a replicated head."""
    facts = ", ".join(f"{key} {value}" for key, value in record["machine"]["facts"].items())
    shape = " ".join(f"{key}={value}" for key, value in record["size"]["shape"].items())
    by_name = {v["name"]: v for v in record["variants"] if v["times_ms"]}
    lines = [
        f"# Vocabulary loss on {record['ranks']} x {record['machine']['name']}",
        "",
        f"{shape} {record['size']['dtype']}; N tokens on every rank, all different",
        "",
        f"`{record['command']}`",
        "",
        f"{record['date']}; {facts}",
        "",
        f"Floor of a rank: {record['floor']['arithmetic']}",
        "",
        "| variant | role | ms median (min-max) | x floor | x liger | x liger_fp32_dw | peak GiB "
        "| worst error | note |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for v in record["variants"]:
        if v["name"] not in by_name:
            lines.append(f"| {v['name']} | {v['role']} | | | | | | | {v['reason']} |")
            continue
        times, middle = v["times_ms"], statistics.median(v["times_ms"])
        peers = [by_name.get(name) for name in ("liger", "liger_fp32_dw")]
        ratios = [f"{middle / statistics.median(p['times_ms']):.2f}" if p else "" for p in peers]
        lines.append(
            f"| {v['name']} | {v['role']} | {middle:.4g} ({min(times):.4g}-{max(times):.4g}) "
            f"| {middle / record['floor']['ms']:.2f} | {' | '.join(ratios)} "
            f"| {v['peak_bytes'] / _GIB:.2f} | {max(v['errors'].values()):.1e} | |"
        )
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.vocabulary_ring")
    parser.add_argument("--size", default="small", choices=list(CASE.sizes))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds (default: 10)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed rounds (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    # What the heading of a record asks for.
    parser.set_defaults(name="vocabulary_ring", recipe=None)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
