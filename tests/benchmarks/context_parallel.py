"""One layer's mixer over several GPUs and on one, at the same tokens in all.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.context_parallel --size 128k

For every mixer: all variants are compared with the whole mixer on fewer tokens, their bytes are
counted and held against the formulas, their peaks are read one at a time, then they take turns. The
whole mixer runs on all ranks at once, each by itself. Files are written after each mixer.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from components.titan.device import use_device
from tests.benchmarks.case import Outputs
from tests.benchmarks.context_report import (
    LEAST_RATIO,
    markdown,
    of_mixer,
    projections_over_hidden,
)
from tests.benchmarks.context_shapes import MIXERS, SIZES, Shape
from tests.benchmarks.harness import relative_error
from tests.benchmarks.machine import Machine, roofline
from tests.benchmarks.probes import Probe, make_probe
from tests.benchmarks.ranks import Progress, highest, peak_of, ranks_heading, start_ranks
from tests.benchmarks.training import RESULTS, publish, settled_machine

if TYPE_CHECKING:
    from tests.benchmarks.context_variants import Bench, Variant

IN_A_ROW = 2
"""Timed calls of a variant in one turn."""

OTHER_POOLS = 2e-2
"""Share of chosen pools that may differ from the whole batch's. Of many scores that are almost
equal, roundings choose others; keys in a wrong order would change half of them."""

HANG_SECONDS = 300
"""After which ranks that wait for one that failed end as well. First calls compile for a while, and
not on all ranks for as long."""

_GIB = 2**30
_WAYS = ("forward", "backward")


def main(arguments: Sequence[str]) -> int:
    """One rank of the measurement; rank 0 prints and writes. Returns 1 if a result was wrong."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    progress = Progress(began, options.time_limit)
    device = use_device(options.device)
    start_ranks(device, HANG_SECONDS)
    # As torchtitan's own start does: what recomputes layers finds its meshes in this thread alone.
    torch.autograd.set_multithreading_enabled(False)
    machine = settled_machine(device)
    record = _record(options, arguments, machine)
    some = "" if set(options.mixers) == set(MIXERS) else "_" + "_".join(options.mixers)
    stem = options.out / f"{options.name}_{record['ranks']}x{machine.slug}_{options.size}{some}"

    def write(figures: dict[str, Any]) -> None:
        record["mixers"].append(figures)
        if dist.get_rank() == 0:
            publish(stem, record, markdown(record), quiet=True)
            print(of_mixer(figures), flush=True)

    measure(SIZES[options.size], make_probe(device), machine, options, progress, write)
    # Not after an error: the others may wait in a collective, and this rank with them.
    dist.destroy_process_group()
    return int(any(map(wrong, record["mixers"])))


def wrong(figures: dict[str, Any]) -> bool:
    """Whether a mixer's results, bytes or ratio are not what they must be."""
    ratio = projections_over_hidden(figures).get("forward", LEAST_RATIO)
    reasons = (v["reason"] for v in figures["variants"])
    return any(reason.startswith("wrong") for reason in reasons) or ratio < LEAST_RATIO


def _record(
    options: argparse.Namespace, arguments: Sequence[str], machine: Machine
) -> dict[str, Any]:
    return {
        **ranks_heading("context_parallel", options, arguments, machine),
        "size": options.size,
        "layout": options.layout,
        "shape": asdict(SIZES[options.size]),
        "mixers": [],
    }


def measure(
    shape: Shape,
    probe: Probe,
    machine: Machine,
    options: argparse.Namespace,
    progress: Progress,
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Measure mixer after mixer, until all are done or time is up. Collective.

    Args:
        options: ``mixers``, ``without``, ``layout``, ``repeats``, ``warmup`` and ``seed``.
        progress: says when time is up.
        write: takes the figures of a mixer, the same on every rank.
    """
    from tests.benchmarks.context_variants import Bench

    for mixer in options.mixers:
        if progress.expired():
            progress.say(f"{mixer}: left out, time is up")
            continue
        progress.say(f"{mixer}: building")
        bench = Bench(shape, mixer, options.layout, probe.device, options.seed)
        write(_Mixer(bench, probe, machine, options, progress).figures())
        del bench
        probe.settle()


class _Mixer:
    """The measurement of one mixer."""

    def __init__(
        self,
        bench: "Bench",
        probe: Probe,
        machine: Machine,
        options: argparse.Namespace,
        progress: Progress,
    ) -> None:
        from tests.benchmarks.context_variants import variants_of

        self._bench, self._probe, self._machine = bench, probe, machine
        self._options, self._progress, self._say = options, progress, progress.say
        self._other_pools: float | None = None
        self._variants = [(v, _figure(v)) for v in variants_of(bench.mixer)]
        for variant, figure in self._variants:
            if variant.name in options.without and not variant.whole:
                figure["reason"] = "left out"

    def figures(self) -> dict[str, Any]:
        """Compare, count, read memory, take turns."""
        self._gate()
        self._bench.take((self._bench.shape.tokens,))
        for variant, figure in self._alive():
            self._count(variant, figure)
        for variant, figure in self._alive():
            self._memory(variant, figure)
        for done in range(0, self._options.repeats, IN_A_ROW):
            if done and self._progress.expired():
                self._say(f"time is up after {done} of {self._options.repeats} repeats")
                break
            for variant, figure in self._alive():
                self._turn(variant, figure, min(IN_A_ROW, self._options.repeats - done))
        found = {
            "mixer": self._bench.mixer,
            "notes": list(self._bench.notes),
            "floor": self._floor(),
            "variants": [figure for _, figure in self._variants],
        }
        if self._other_pools is not None:
            found["other_pools"] = self._other_pools
        return found

    def _alive(self) -> list[tuple["Variant", dict[str, Any]]]:
        return [(v, figure) for v, figure in self._variants if not figure["reason"]]

    def _gate(self) -> None:
        """Fill in errors on fewer tokens, and why a variant is not timed."""
        bench, tolerance = self._bench, self._bench.shape.tolerance
        bench.take(bench.shape.gate)
        if bench.mixer == "dsa":
            self._other_pools = highest(bench.other_pools())
        expected: Outputs = {}
        for variant, figure in self._alive():
            found = bench.result(variant)
            expected = expected or found
            figure["errors"] = {
                name: highest(relative_error(found[name], value) if name in found else float("inf"))
                for name, value in expected.items()
            }
            bad = [name for name, error in figure["errors"].items() if error > tolerance]
            if bad:
                figure["reason"] = f"wrong: {', '.join(bad)}"
            elif (self._other_pools or 0.0) > OTHER_POOLS and not variant.whole:
                figure["reason"] = "wrong: pools"
            error = max(figure["errors"].values())
            self._say(f"{variant.name}: error {error:.1e} {figure['reason']}".rstrip())
        if bench.mixer == "dsa":
            bench.choose_freely()

    def _count(self, variant: "Variant", figure: dict[str, Any]) -> None:
        """Bytes of one call, in either direction, and whether they are the formula's."""
        traffic, expected = self._bench.link.traffic, self._bench.volume(variant)
        traffic.reset()
        self._bench.step(variant)  # what is loaded and compiled once is no part of peaks and times
        sent = dict(traffic.sent)
        halo = {way: sent.pop(("kda.halo", way), 0) for way in _WAYS}
        counted = {way: sum(n for (_, w), n in sent.items() if w == way) for way in _WAYS}
        formula = dict(zip(_WAYS, expected, strict=True))
        differs = highest(counted != formula)
        figure["sent"] = {way: int(highest(counted[way])) for way in _WAYS}
        figure["formula"] = {way: int(highest(formula[way])) for way in _WAYS}
        figure["halo_bytes"] = int(highest(sum(halo.values())))
        if differs:
            figure["reason"] = f"wrong: {counted} bytes sent, the formula says {formula}"
        text = ", ".join(f"{way} {figure['sent'][way]:,}" for way in _WAYS)
        self._say(f"{variant.name}: bytes sent {text} {figure['reason']}".rstrip())

    def _memory(self, variant: "Variant", figure: dict[str, Any]) -> None:
        peak = peak_of(self._probe, partial(self._bench.step, variant))
        if peak is None:
            figure["reason"] = "out of memory"
            self._say(f"{variant.name}: out of memory")
            return
        figure["above_bytes"] = peak.above
        figure["peak_bytes"] = peak.above + self._bench.input_bytes(variant)
        figure["reserved_bytes"] = peak.reserved
        self._say(f"{variant.name}: peak {figure['peak_bytes'] / _GIB:.3f} GiB")

    def _turn(self, variant: "Variant", figure: dict[str, Any], repeats: int) -> None:
        # Blocks that others left in the allocator fit nobody else: each turn begins without.
        self._probe.settle()
        call = partial(self._bench.step, variant)
        for _ in range(self._options.warmup):
            call()
        for _ in range(repeats):
            dist.barrier()
            figure["times_ms"].append(highest(self._probe.time_ms(call)))
        self._say(f"{variant.name}: {' '.join(f'{ms:.4g}' for ms in figure['times_ms'])} ms")

    def _floor(self) -> dict[str, Any]:
        bench, ranks = self._bench, dist.get_world_size()
        flops, tokens, shape = bench.flops(), bench.shape.tokens, bench.shape
        width = getattr(torch, shape.dtype).itemsize
        rows = 4.0 * width * tokens * bench.dim
        whole = roofline(
            self._machine,
            dtype=shape.dtype,
            flops=flops,
            flops_text=f"forward and twice that backward of {tokens} tokens",
            nbytes=rows,
            bytes_text=f"x, out and their gradients: 4 x {width} B x {tokens} x {bench.dim}",
        )
        return {
            "whole_ms": whole.ms,
            "split_ms": whole.ms / ranks,
            "arithmetic": f"{whole.arithmetic}; of {ranks} ranks {whole.ms / ranks:.4g} ms each, "
            "what they send aside",
        }


def _figure(variant: "Variant") -> dict[str, Any]:
    return {"name": variant.name, "reason": "", "errors": {}, "times_ms": []}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.context_parallel")
    parser.add_argument("--size", default="tiny", choices=list(SIZES))
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS)
    parser.add_argument("--without", nargs="+", default=[], help="methods to leave out")
    parser.add_argument("--layout", default="zigzag", choices=("contiguous", "zigzag"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=6, help="timed calls (default: 6)")
    parser.add_argument(
        "--warmup", type=int, default=1, help="untimed calls before two timed ones (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, help="seconds; ends between rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    # What the heading of a record asks for.
    parser.set_defaults(name="context_parallel", recipe=None)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
