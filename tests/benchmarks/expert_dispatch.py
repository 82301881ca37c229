"""One layer of routed experts on several GPUs, under even and uneven routing, each way beside the
others in one run.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.expert_dispatch --size 65k

For every profile: all variants are compared with plain expert parallelism on fewer tokens, their
peaks are read one at a time, then they take turns. Times are of the slowest rank, with a barrier
before each call; peaks are of the fullest rank, weights and tokens included, nothing else on the
device. Files are written after each profile. What would not fit is left out beforehand, by an
estimate that all ranks share: a rank that ran out alone would leave the others waiting.
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

from components.expert_dispatch.profiles import BALANCED
from components.titan.device import use_device
from tests.benchmarks.case import Outputs
from tests.benchmarks.expert_report import markdown, of_profile
from tests.benchmarks.expert_shapes import (
    SIZES,
    Shape,
    estimated_peak,
    floors,
    profile_for,
    resident_bytes,
    traffic,
)
from tests.benchmarks.harness import relative_error
from tests.benchmarks.machine import Machine
from tests.benchmarks.probes import Probe, make_probe
from tests.benchmarks.ranks import Progress, highest, peak_of, ranks_heading, start_ranks
from tests.benchmarks.training import RESULTS, publish, settled_machine

if TYPE_CHECKING:
    from tests.benchmarks.expert_variants import Bench, Variant

TOLERANCE = 2e-2
"""Relative: bfloat16 sums in other orders, rounded at other places, stay below half of it."""

IN_A_ROW = 2
"""Timed rounds of a variant in one turn."""

HANG_SECONDS = 60
"""After which ranks that wait for one that failed end as well."""

_GIB = 2**30


def main(arguments: Sequence[str]) -> int:
    """One rank of the measurement; rank 0 prints and writes. Returns 1 if ours was wrong."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    progress = Progress(began, options.time_limit)
    device = use_device(options.device)
    start_ranks(device, HANG_SECONDS)
    machine = settled_machine(device)
    record = _record(options, arguments, machine)
    stem = options.out / f"{options.name}_{record['ranks']}x{machine.slug}_{options.size}"

    def write(figures: dict[str, Any]) -> None:
        record["profiles"].append(figures)
        if dist.get_rank() == 0:
            publish(stem, record, markdown(record), quiet=True)
            print(of_profile(figures), flush=True)

    measure(SIZES[options.size], make_probe(device), machine, options, progress, write)
    variants = [v for figures in record["profiles"] for v in figures["variants"]]
    wrong = any(v["role"] == "ours" and v["reason"].startswith("wrong") for v in variants)
    # Not after an error: the others may wait in a collective, and this rank with them.
    dist.destroy_process_group()
    return int(wrong)


def _record(
    options: argparse.Namespace, arguments: Sequence[str], machine: Machine
) -> dict[str, Any]:
    return {
        **ranks_heading("expert_dispatch", options, arguments, machine),
        "size": options.size,
        "shape": asdict(SIZES[options.size]),
        "profiles": [],
    }


def measure(
    shape: Shape,
    probe: Probe,
    machine: Machine,
    options: argparse.Namespace,
    progress: Progress,
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Measure profile after profile, until all are done or time is up. Collective.

    Args:
        options: ``profiles``, ``variants``, ``repeats``, ``warmup``, ``seed`` and
            ``memory_limit``.
        progress: says when time is up.
        write: takes the figures of a profile, the same on every rank.

    Raises:
        ValueError: an unknown variant or profile.
    """
    from tests.benchmarks.expert_variants import VARIANTS, Bench

    names = [variant.name for variant in VARIANTS]
    unknown = sorted(set(options.variants or ()) - set(names))
    if unknown:
        raise ValueError(f"--variants {' '.join(unknown)}: legal are {', '.join(names)}")
    for text in options.profiles:
        profile_for(text, shape.experts * dist.get_world_size())
    bench = Bench(shape, probe.device, options.seed)
    for text in options.profiles:
        if progress.expired():
            progress.say(f"{text}: left out, time is up")
            return
        write(_Profile(text, shape, bench, probe, machine, options, progress).figures())


class _Profile:
    """The measurement under one routing profile."""

    def __init__(
        self,
        text: str,
        shape: Shape,
        bench: "Bench",
        probe: Probe,
        machine: Machine,
        options: argparse.Namespace,
        progress: Progress,
    ) -> None:
        from tests.benchmarks.expert_variants import VARIANTS

        self._text, self._shape, self._bench, self._probe = text, shape, bench, probe
        self._machine, self._options = machine, options
        self._progress, self._say = progress, progress.say
        self._ranks = dist.get_world_size()
        self._experts = shape.experts * self._ranks
        self._profile = profile_for(text, self._experts)
        wanted = options.variants or [variant.name for variant in VARIANTS]
        self._variants = [(v, self._figure(v)) for v in VARIANTS if v.name in wanted]

    def figures(self) -> dict[str, Any]:
        """Check, read memory, take turns."""
        self._say(f"{self._text} ({self._profile} of {self._experts} experts): comparing results")
        self._gate()
        self._bench.route(self._shape, self._profile)
        alive = [(v, figure, self._bench.build(v)) for v, figure in self._variants if _ok(figure)]
        for variant, figure, experts in alive:
            self._memory(variant, figure, experts)
        alive = [each for each in alive if _ok(each[1])]
        for done in range(0, self._options.repeats, IN_A_ROW):
            if done and self._progress.expired():
                self._say(f"{self._text}: time is up after {done} of {self._options.repeats}")
                break
            repeats = min(IN_A_ROW, self._options.repeats - done)
            for variant, figure, experts in alive:
                self._turn(variant, figure, experts, repeats)
        planned = traffic(
            self._shape, self._ranks, self._profile, planned=True, chunks=self._shape.chunks
        )
        return {
            "profile": self._text,
            "scaled": str(self._profile),
            "experts": self._experts,
            "resident_bytes": resident_bytes(self._shape),
            "floor": floors(self._shape, planned, self._machine),
            "variants": [figure for _, figure in self._variants],
        }

    def _figure(self, variant: "Variant") -> dict[str, Any]:
        chunks = self._shape.chunks if variant.chunked else 1
        moved = traffic(
            self._shape, self._ranks, self._profile, planned=variant.planned, chunks=chunks
        )
        estimate = estimated_peak(self._shape, moved, whole=variant.whole, rounded=variant.rounded)
        return {
            "name": variant.name,
            "role": variant.role,
            "reason": self._misfit(estimate),
            "estimated_peak_bytes": estimate,
            "traffic": asdict(moved),
            # Forward alone; as many again where backward fetches them anew, and as gradients.
            "migrated_bytes": moved.migrated * self._shape.expert_bytes,
            "errors": {},
            "forward_ms": [],
            "both_ms": [],
        }

    def _misfit(self, estimate: int) -> str:
        limit = self._options.memory_limit
        if limit is None and self._probe.device == "cuda":
            limit = torch.cuda.get_device_properties(0).total_memory / _GIB
        if limit is None or estimate <= limit * _GIB:
            return ""
        return f"out of memory: an estimated {estimate / _GIB:.3g} GiB of {limit:.3g} GiB"

    def _gate(self) -> None:
        """Fill in errors on fewer tokens, and why a variant is not timed."""
        from tests.benchmarks.expert_variants import REFERENCE

        self._bench.route(self._shape.gate(), self._profile)
        reference = self._bench.both(REFERENCE, self._bench.build(REFERENCE))
        expected = {name: value.float() for name, value in reference.items()}
        del reference
        for variant, figure in self._variants:
            if not _ok(figure):
                self._say(f"{variant.name}: {figure['reason']}")
                continue
            experts = self._bench.build(variant)
            found = self._bench.both(variant, experts)
            alone = self._bench.forward(variant, experts)
            figure["errors"] = self._errors({**found, "forward": alone["out"]}, expected)
            bad = [name for name, error in figure["errors"].items() if error > TOLERANCE]
            if bad:
                figure["reason"] = f"wrong: {', '.join(bad)}"
                self._say(f"{variant.name}: {figure['reason']}")

    def _errors(self, found: Outputs, expected: Outputs) -> dict[str, float]:
        return {
            name: highest(
                relative_error(found[name].float(), expected["out" if name == "forward" else name])
                if name in found
                else float("inf")
            )
            for name in (*expected, "forward")
        }

    def _memory(self, variant: "Variant", figure: dict[str, Any], experts: Any) -> None:
        """Peaks of a call; or why there are none, if a rank ran out and the others got through."""
        for kind in ("forward", "both"):
            peak = peak_of(self._probe, partial(self._call, kind, variant, experts))
            if peak is None:
                estimate = f"{figure['estimated_peak_bytes'] / _GIB:.3g} GiB were estimated"
                figure["reason"] = f"out of memory ({kind}), although {estimate}"
                self._say(f"{variant.name}: {figure['reason']}")
                return
            figure[f"{kind}_above_bytes"] = peak.above
            figure[f"{kind}_peak_bytes"] = peak.above + self._bench.input_bytes
            figure[f"{kind}_reserved_bytes"] = peak.reserved
        load = getattr(experts, "latest", None)
        if load is not None:
            figure["realised_receive_peak"] = int(highest(load.receive_peak))
        most, error = figure["both_peak_bytes"] / _GIB, max(figure["errors"].values())
        self._say(f"{variant.name}: peak {most:.3f} GiB, error {error:.1e}")

    def _turn(self, variant: "Variant", figure: dict[str, Any], experts: Any, repeats: int) -> None:
        # Blocks that others left in the allocator fit nobody else, and asking for new ones while
        # the device is full of them is slow: each turn begins without, and is warmed up.
        self._probe.settle()
        for _ in range(self._options.warmup):
            self._call("both", variant, experts)
        for _ in range(repeats):
            for kind in ("forward", "both"):
                figure[f"{kind}_ms"].append(self._time(kind, variant, experts))

    def _time(self, kind: str, variant: "Variant", experts: Any) -> float:
        dist.barrier()
        return highest(self._probe.time_ms(partial(self._call, kind, variant, experts)))

    def _call(self, kind: str, variant: "Variant", experts: Any) -> Outputs:
        return getattr(self._bench, kind)(variant, experts)


def _ok(figure: dict[str, Any]) -> bool:
    return not figure["reason"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.expert_dispatch")
    parser.add_argument("--size", default="tiny", choices=list(SIZES))
    parser.add_argument(
        "--profiles",
        nargs="+",
        default=[BALANCED, "80/16", "50/4"],
        help="'balanced' or percent of the tokens / hot experts of 128, scaled to the experts here",
    )
    parser.add_argument("--variants", nargs="+", help="default: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=6, help="timed rounds (default: 6)")
    parser.add_argument(
        "--warmup", type=int, default=1, help="untimed calls before two timed rounds (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, help="seconds; ends between rounds")
    parser.add_argument(
        "--memory-limit", type=float, help="GiB of a device (default: what it has; a CPU: none)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    # What the heading of a record asks for.
    parser.set_defaults(name="expert_dispatch", recipe=None)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
