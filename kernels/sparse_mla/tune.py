"""Find the fastest form of each kernel on this GPU and write ``tuned.json``; part of ``make tune``.

Every legal form is held against the twin first: one that does not compile or is wrong is named and
left out. ``split`` is measured at GLM-5.3-Flash's shape, ``simple`` at DeepSeek-V3.2's, whose tail
it alone takes; which of the two is preferred where both run, at the former.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kernels.backends import machine
from kernels.sparse_mla import tuned
from kernels.sparse_mla.shape import Shape

GLM = Shape(heads=64, width=512, tail=0, size=4, scale=256**-0.5)
DEEPSEEK = Shape(heads=128, width=512, tail=64, size=1, scale=192**-0.5)
MEASURED_AT = {"split": GLM, "simple": DEEPSEEK}

REGISTERS = ((240, 24), (232, 40), (224, 56), (216, 72))
"""Per thread of the two warpgroups that compute and of the one that loads: 504 together, counting
the first twice, in steps of 8."""

THREADS = (256, 128)
SCATTERS = {"split": ("lines", "quads", "pairs"), "simple": ("pairs",)}

GAIN = 0.01
"""What a form has to be faster by than the listed one to take its place."""

Table = dict[str, dict[str, dict[str, Any]]]
"""By direction and variant; see ``kernels.sparse_mla.tuned.table``."""


@dataclass(frozen=True)
class Plan:
    """One form of a kernel.

    Attributes:
        direction: "forward" or "backward".
        variant: of ``tuned.VARIANTS``.
        options: of its ``build``.
    """

    direction: str
    variant: str
    options: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.direction} {self.variant} ({options})"


class Bench(Protocol):
    """Runs a form; see ``kernels.sparse_mla.bench.OnGpu``."""

    def wrong(self, plan: Plan, shape: Shape, probabilities: bool) -> str | None:
        """What differs from the twin by too much, or None.

        Raises:
            RuntimeError: it does not compile or launch.
        """
        ...

    def milliseconds(self, plan: Plan, shape: Shape) -> float:
        """Time of one call."""
        ...


@dataclass(frozen=True)
class Measured:
    """A form that is right, and its milliseconds."""

    plan: Plan
    ms: float


def plans(direction: str, variant: str, listed: dict[str, Any]) -> Iterator[Plan]:
    """The listed form, then every other legal one; options that are not tuned stay as listed."""
    yield Plan(direction, variant, dict(listed))
    if variant == "split":
        names = "consumer_registers", "producer_registers"
        launches = [dict(zip(names, pair, strict=True)) for pair in REGISTERS]
    else:
        launches = [{"threads": threads} for threads in THREADS]
    scatters: list[dict[str, Any]] = [{}]
    if direction == "backward":
        scatters = [{"scatter": name} for name in SCATTERS[variant]]
    for scatter in scatters:
        for launch in launches:
            options = {**listed, **scatter, **launch}
            if options != listed:
                yield Plan(direction, variant, options)


def tune(bench: Bench, listed: Table, say: Callable[[str], None]) -> Table:
    """The table with the fastest forms.

    Args:
        bench: runs the forms.
        listed: what there is.
        say: is told every measurement, and old and new.

    Raises:
        RuntimeError: no form of a kernel is right.
    """
    found: Table = {}
    for direction, variants in tuned.VARIANTS.items():
        old, new = listed[direction], dict(listed[direction])
        best = {}
        for variant in variants:
            best[variant] = _fastest(bench, direction, variant, old[variant], say)
            new[variant] = best[variant].options
        times = {v: _measure(bench, plan, GLM, say) for v, plan in best.items()}
        right = {v: measured.ms for v, measured in times.items() if measured is not None}
        preferred = old["preferred"]["variant"]
        challenger = min(right, key=lambda v: right[v], default=preferred)
        if right.get(challenger, 0) < (1 - GAIN) * right.get(preferred, float("inf")):
            preferred = challenger
        new["preferred"] = {**old["preferred"], "variant": preferred}
        found[direction] = new
        for name in ("preferred", *variants):
            say(f"{direction} {name}: {_change(old[name], new[name])}")
    return found


def _fastest(
    bench: Bench,
    direction: str,
    variant: str,
    listed: dict[str, Any],
    say: Callable[[str], None],
) -> Plan:
    shape = MEASURED_AT[variant]
    tried = (_measure(bench, plan, shape, say) for plan in plans(direction, variant, listed))
    right = [measured for measured in tried if measured is not None]

    def rank(measured: Measured) -> float:
        return measured.ms * (1 - GAIN if measured.plan.options == listed else 1)

    for measured in sorted(right, key=rank):
        # What also writes down probabilities is another kernel, so only the winner is asked.
        if direction == "forward" or _is_right(bench, measured.plan, shape, True, say):
            return measured.plan
    raise RuntimeError(
        f"sparse_mla: no form of the {variant} {direction} is right on this GPU for {shape}; "
        f"{tuned.PATH.name} stays as it is"
    )


def _measure(bench: Bench, plan: Plan, shape: Shape, say: Callable[[str], None]) -> Measured | None:
    if not _is_right(bench, plan, shape, False, say):
        return None
    ms = bench.milliseconds(plan, shape)
    say(f"{plan}: {ms:.3f} ms")
    return Measured(plan, ms)


def _is_right(
    bench: Bench, plan: Plan, shape: Shape, probabilities: bool, say: Callable[[str], None]
) -> bool:
    try:
        reason = bench.wrong(plan, shape, probabilities)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    if reason is not None:
        say(f"{plan}: left out, {reason}")
    return reason is None


def _change(old: dict[str, Any], new: dict[str, Any]) -> str:
    return f"{json.dumps(old)} stays" if old == new else f"{json.dumps(old)} -> {json.dumps(new)}"


def write(tables: dict[str, Table], path: Path = tuned.PATH) -> None:
    """Write a file that ``tuned.table`` reads, one variant a line."""
    blocks = []
    for architecture, directions in tables.items():
        parts = []
        for direction, variants in directions.items():
            lines = [f"      {json.dumps(v)}: {json.dumps(o)}" for v, o in variants.items()]
            parts.append(f"    {json.dumps(direction)}: {{\n" + ",\n".join(lines) + "\n    }")
        blocks.append(f"  {json.dumps(architecture)}: {{\n" + ",\n".join(parts) + "\n  }")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def main() -> int:
    """Returns the exit status: 2 where the kernels do not run."""
    reason = machine.why_not("tilelang", "cuda", machine.HOPPER, {})
    if not torch.cuda.is_available():
        reason = "torch sees no GPU"
    if reason is not None:
        print(f"sparse_mla is not tuned here: {reason}", file=sys.stderr)
        return 2
    from kernels.sparse_mla.bench import OnGpu

    tables = json.loads(tuned.PATH.read_text())
    tables["sm_90a"] |= tune(OnGpu(), tables["sm_90a"], lambda line: print(line, flush=True))
    write(tables)
    tuned.table.cache_clear()
    print(f"{tuned.PATH}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
