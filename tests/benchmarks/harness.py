"""Run one case: gate on correctness, then read memory, then time the variants in turns.

Order of a run:

1. every variant computes the gate's inputs and is compared with the reference;
2. each variant is called alone with memory statistics reset (not timed);
3. all variants warm up, then take turns (a b c, a b c, ...) so that drift hits them alike;
4. the machine's ceilings are measured again, to tell whether it was disturbed.

A variant that is missing, runs out of memory or raises stays in the report with the reason.
"""

import importlib.util
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from tests.benchmarks.case import Case, Outputs, Runnable, Size, Variant
from tests.benchmarks.fetched import Fetched
from tests.benchmarks.machine import Ceilings, Floor, Machine, better_of, measure_ceilings
from tests.benchmarks.probes import Memory, Probe

Status = Literal["ok", "not installed", "not supported", "out of memory", "failed", "wrong"]
T = TypeVar("T")


class GateError(Exception):
    """A variant of ours computes something else than the reference; no speed is reported."""


@dataclass(kw_only=True, slots=True)
class Options:
    """How much to measure: untimed rounds, timed rounds, seed of the inputs."""

    warmup: int = 2
    repeats: int = 10
    seed: int = 0


def compare(outputs: Outputs, reference: Outputs) -> dict[str, float]:
    """``relative_error`` by name; inf where an output is missing or not wanted."""
    return {
        name: relative_error(outputs[name], reference[name])
        if name in reference and name in outputs
        else float("inf")
        for name in reference.keys() | outputs.keys()
    }


@dataclass(kw_only=True, slots=True)
class Timing:
    """Statistics of all repeats; ``spread`` is (max - min) / median."""

    median: float
    min: float
    max: float
    spread: float


@dataclass(kw_only=True, slots=True)
class Result:
    """What happened to one variant.

    Attributes:
        errors: output name -> ``|out - ref| / |ref|`` at the gate.
        first_call_ms: wall time of the very first call: compilation and autotuning included.
        memory: of one call alone; None with ``memory_reason`` set where it cannot be read.
        times_ms: every timed repeat, in order.
    """

    variant: Variant
    status: Status = "ok"
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    first_call_ms: float | None = None
    memory: Memory | None = None
    memory_reason: str = ""
    times_ms: list[float] = field(default_factory=list)

    @property
    def timing(self) -> Timing | None:
        """None unless the variant completed every stage."""
        return summarise(self.times_ms) if self.status == "ok" and self.times_ms else None


@dataclass(kw_only=True, slots=True)
class Report:
    """Everything one run measured, in the case's order of variants.

    ``machine.ceilings`` were measured before the variants ran, ``ceilings_after`` after them: a
    machine that was busy or throttled meanwhile shows in the difference. The floor takes the better
    of both.
    """

    case: Case
    size_name: str
    size: Size
    machine: Machine
    options: Options
    floor: Floor
    results: list[Result]
    probe: Probe
    ceilings_after: Ceilings

    @property
    def best_peer(self) -> Result | None:
        """The peer with the lowest median of those that compute the case's outputs, or None."""
        peers = [r for r in self.results if r.variant.role == "peer" and r.variant.check is None]
        timed = [r for r in peers if r.timing is not None]
        return min(timed, key=lambda r: statistics.median(r.times_ms), default=None)


def summarise(times_ms: list[float]) -> Timing:
    """Statistics of a non-empty list of milliseconds."""
    median, low, high = statistics.median(times_ms), min(times_ms), max(times_ms)
    return Timing(median=median, min=low, max=high, spread=(high - low) / median)


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """``|output - reference| / |reference|`` in the reference's dtype.

    inf if the shapes differ, a value is not finite, or only the reference is all zeros.
    """
    if output.shape != reference.shape:
        return float("inf")
    difference = torch.linalg.vector_norm(output.to(reference.dtype) - reference).item()
    norm = torch.linalg.vector_norm(reference).item()
    if difference == 0:
        return 0.0
    error = difference / norm if norm else float("inf")
    return error if error == error else float("inf")


def run_case(
    case: Case,
    size_name: str,
    probe: Probe,
    machine: Machine,
    options: Options,
    remeasure: Callable[[Probe], Ceilings] = measure_ceilings,
    peers: Fetched = Fetched(),  # noqa: B008 - frozen
) -> Report:
    """Gate, measure and time every variant of ``case``.

    Args:
        case: what to run.
        size_name: one of ``case.sizes``.
        probe: clock and memory meter of the device.
        machine: surveyed just before.
        options: how much to measure.
        remeasure: called once at the end, for the ceilings after the run.
        peers: where kernels of others were fetched to.

    Raises:
        GateError: a variant of ours disagrees with the reference (nothing is timed).
    """
    size = case.sizes[size_name]
    case.floor(size, machine)  # refuses an impossible size before anything is measured
    results = [Result(variant=variant) for variant in case.variants]
    run = _Run(case=case, size=size, probe=probe, options=options, results=results, peers=peers)
    run.check_availability()
    run.gate()
    run.measure()
    after = remeasure(probe)
    best = replace(machine, ceilings=better_of(machine.ceilings, after))
    return Report(
        case=case,
        size_name=size_name,
        size=size,
        machine=machine,
        options=options,
        floor=case.floor(size, best),
        results=results,
        probe=probe,
        ceilings_after=after,
    )


@dataclass(kw_only=True, slots=True)
class _Run:
    case: Case
    size: Size
    probe: Probe
    options: Options
    results: list[Result]
    peers: Fetched

    @property
    def alive(self) -> list[Result]:
        return [result for result in self.results if result.status == "ok"]

    def check_availability(self) -> None:
        for result in self.results:
            result.status, result.reason = self._availability(result.variant)

    def _availability(self, variant: Variant) -> tuple[Status, str]:
        missing = [name for name in variant.requires if importlib.util.find_spec(name) is None]
        if missing:
            return "not installed", f"needs {', '.join(missing)}"
        if files := self.peers.missing(variant.files):
            return "not installed", f"needs {', '.join(files)} in the folder given by --peers"
        if self.probe.device not in variant.devices:
            needs = " or ".join(variant.devices)
            return "not supported", f"needs {needs}, this run is on {self.probe.device}"
        if variant.dtypes is not None and self.size.dtype not in variant.dtypes:
            takes = " or ".join(variant.dtypes)
            return "not supported", f"takes {takes}, not {self.size.dtype}"
        if variant.unfit is not None and (reason := variant.unfit(self.size)):
            return "not supported", reason
        return "ok", ""

    def gate(self) -> None:
        inputs = self._inputs(self.options.seed + 1, "gate")
        reference = self.case.reference(inputs)
        tolerance = self.case.tolerance(self.size)
        for result in self.alive:
            self._attempt(result, "gate", partial(self._compare, result, inputs, reference))
            self.probe.settle()
            if result.status == "ok":
                self._judge(result, tolerance)
            _say(f"gate    {result.variant.name}: {result.status} {result.reason}".rstrip())
        wrong = [r for r in self.results if r.status == "wrong" and r.variant.role == "ours"]
        if wrong:
            lines = "\n".join(f"  {r.variant.name}: {r.reason}" for r in wrong)
            raise GateError(f"{self.case.name}: no speed reported, the result is wrong\n{lines}")

    def _compare(self, result: Result, inputs: Any, reference: Outputs) -> None:
        with self._opened(result, inputs) as runnable:
            start = time.perf_counter()
            outputs = runnable.call()
            if self.probe.device == "cuda":
                torch.cuda.synchronize()
            result.first_call_ms = (time.perf_counter() - start) * 1e3
            check = result.variant.check
            errors = compare(outputs, reference) if check is None else check(inputs, outputs)
            result.errors.update(errors)

    def _judge(self, result: Result, tolerance: Mapping[str, float]) -> None:
        # An output without a tolerance has to be exact; one that is missing or not wanted is inf.
        bad = [
            f"{name} error {error:.3g} > {tolerance.get(name, 0.0):.3g}"
            for name, error in sorted(result.errors.items())
            if error > tolerance.get(name, 0.0)
        ]
        if bad:
            result.status, result.reason = "wrong", "; ".join(bad)

    def measure(self) -> None:
        """Memory of each variant alone, then the time of all of them in turns."""
        inputs = self._inputs(self.options.seed + 2, "timing")
        for result in self.alive:
            self._attempt(result, "memory", partial(self._measure_memory, result, inputs))
            _say(f"memory  {result.variant.name}: {result.status}")
        bound: dict[str, Runnable] = {}
        for result in self.alive:
            runnable = self._attempt(result, "build", partial(self._build, result, inputs))
            if runnable is not None:
                bound[result.variant.name] = runnable
        self._take_turns(bound)
        for result in self.alive:
            self._attempt(result, "cleanup", partial(_close, bound.pop(result.variant.name)))
        self.probe.settle()

    def _take_turns(self, bound: dict[str, Runnable]) -> None:
        for turn in range(-self.options.warmup, self.options.repeats):
            for result in self.alive:
                self.probe.flush()
                call = bound[result.variant.name].call
                stage = "warm-up" if turn < 0 else "timing"
                elapsed = self._attempt(result, stage, partial(self.probe.time_ms, call))
                if elapsed is None:
                    _close(bound.pop(result.variant.name))
                elif turn >= 0:
                    result.times_ms.append(elapsed)
            _say(f"round   {turn + 1} of {self.options.repeats}" if turn >= 0 else "warm-up")

    def _measure_memory(self, result: Result, inputs: Any) -> None:
        with self._opened(result, inputs) as runnable:
            try:
                result.memory = self.probe.memory(runnable.call)
            except OSError as error:
                result.memory_reason = f"not measured: {error}"

    def _inputs(self, seed: int, stage: Literal["gate", "timing"]) -> Any:
        return self.case.inputs(self.size, self.probe.device, seed, stage)

    @contextmanager
    def _opened(self, result: Result, inputs: Any) -> Iterator[Runnable]:
        runnable = self._build(result, inputs)
        try:
            yield runnable
        finally:
            _close(runnable)

    def _build(self, result: Result, inputs: Any) -> Runnable:
        fetched = (self.peers,) if result.variant.files else ()
        return result.variant.build(inputs, self.probe.device, *fetched)

    def _attempt(self, result: Result, stage: str, work: Callable[[], T]) -> T | None:
        """Run one step of one variant; its failure is a finding about it, not about the run."""
        try:
            return work()
        except Exception as error:
            if is_out_of_memory(error):
                result.status = "out of memory"
            else:
                result.status = "failed"
                traceback.print_exc()
            result.reason = f"{stage}: {type(error).__name__}: {_first_line(error)}"
        # Only now has the traceback let go of the tensors in its frames.
        self.probe.settle()
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's or the host's allocator refused (torch words the latter itself)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]


def _close(runnable: Runnable) -> None:
    if runnable.cleanup is not None:
        runnable.cleanup()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
