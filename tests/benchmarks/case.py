"""What a benchmark case declares. The harness does everything else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tests.benchmarks.machine import Floor, Machine
from tests.benchmarks.probes import Device

Role = Literal["ours", "peer"]
Stage = Literal["gate", "timing"]
Outputs = Mapping[str, torch.Tensor]
"""Results of one call, gradients included, by name. The caller owns them: a variant keeps none."""

BOTH: tuple[Device, ...] = ("cpu", "cuda")


@dataclass(kw_only=True, slots=True)
class Size:
    """One set of shapes.

    Attributes:
        shape: dimension name -> extent.
        dtype: torch dtype name of the inputs ("float32", "bfloat16").
        devices: where this size finishes in reasonable time and fits.
    """

    shape: Mapping[str, int]
    dtype: str
    devices: tuple[Device, ...] = BOTH

    def __str__(self) -> str:
        extents = " ".join(f"{key}={value}" for key, value in self.shape.items())
        return f"{extents} {self.dtype}"


@dataclass(kw_only=True, slots=True)
class Runnable:
    """A variant bound to its inputs: ``call`` is what is timed, ``cleanup`` runs once after."""

    call: Callable[[], Outputs]
    cleanup: Callable[[], None] | None = None


@dataclass(kw_only=True, slots=True)
class Variant:
    """One way to compute the case's outputs.

    Attributes:
        name: unique within the case.
        role: "ours" is what the project ships or configures; "peer" is what it is compared with.
        build: inputs, device -> Runnable. Third-party imports belong in here, so that importing a
            case needs neither a GPU nor the peer. With ``files``, a third argument: ``Fetched``.
        requires: top-level packages; when one is missing the variant is recorded as not installed.
        files: of the folder given by ``--peers``; when one is missing, not installed.
        devices: where it can run.
        dtypes: input dtypes it takes; None for any.
        unfit: size -> why it is not run at that size; an empty string where it is.
        check: inputs, outputs of the call -> errors by name, judged as all others; for one that
            computes something else than the case's outputs, which it is then not compared with.
    """

    name: str
    role: Role
    build: Callable[..., Runnable]
    requires: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    devices: tuple[Device, ...] = BOTH
    dtypes: tuple[str, ...] | None = None
    unfit: Callable[[Size], str] | None = None
    check: Callable[[Any, Outputs], Mapping[str, float]] | None = None


@dataclass(kw_only=True, slots=True)
class Case:
    """A benchmark: one question, several answers that must agree before they are timed.

    Attributes:
        name: the module's name under ``tests/benchmarks/cases``.
        question: the one line that the figures answer.
        sizes: name -> Size; "small" runs on a CPU in seconds.
        inputs: size, device, seed, stage -> whatever ``build`` and ``reference`` take. Called with
            stage "gate" (may add hard values such as masked rows) and then, with another seed,
            with stage "timing" (the work that the floor counts).
        reference: inputs -> the outputs in higher precision.
        tolerance: size -> output name -> largest allowed ``|out - ref| / |ref|`` (Frobenius);
            an output not named has to be exact.
        floor: size, machine -> the time that no variant can beat by much, with its arithmetic.
        variants: in the order of the table.

    Raises:
        ValueError: no "small" size for the CPU, no variant of ours, or repeated variant names.
    """

    name: str
    question: str
    sizes: Mapping[str, Size]
    inputs: Callable[[Size, Device, int, Stage], Any]
    reference: Callable[[Any], Outputs]
    tolerance: Callable[[Size], Mapping[str, float]]
    floor: Callable[[Size, Machine], Floor]
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        small = self.sizes.get("small")
        if small is None or "cpu" not in small.devices:
            raise ValueError(f"case {self.name!r}: sizes needs a 'small' that runs on the cpu")
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"case {self.name!r}: variant names repeat: {', '.join(names)}")
        if not any(variant.role == "ours" for variant in self.variants):
            raise ValueError(f"case {self.name!r}: no variant has the role 'ours'")
