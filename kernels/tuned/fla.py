"""Give fla's kernels the configurations that measuring would find, so that no run measures.

Triton's autotuner remembers the fastest configuration per key (widths, head counts, dtypes) in a
dictionary, and measures for minutes what is not in it: three to five for one set of widths. Here
the dictionary is filled from a file instead. That is the one form that outlives a machine: Triton's
own results on disk are found by a hash of the kernels' source, the compiler and its back end, and
fla's configuration files are switched by environment variables that it reads once, when imported.

A file counts only for the GPU and the versions of fla-core and Triton that it was measured with:
others would take the configurations too, and might be slow with them. Without one Triton measures,
as it does for keys that a file does not have.
"""

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
PACKAGES = ("fla-core", "triton")

HEADS = frozenset({"H", "HV"})
"""What fla's kernels call the number of heads in their keys."""

CHANNELS = frozenset({"causal_conv1d_fwd_kernel", "causal_conv1d_bwd_kernel"})
"""Kernels whose key has the width of all heads, as "D", instead of their number."""


@dataclass(frozen=True)
class Entry:
    """The fastest configuration for one key.

    Attributes:
        key: what Triton looks it up by.
        kwargs: tile sizes.
        num_warps, num_stages: see ``triton.Config``.
    """

    key: list[Any]
    kwargs: dict[str, int]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Kernel:
    """One kernel's entries.

    Attributes:
        module: where it is, in fla.
        entries: by key.
    """

    module: str
    entries: list[Entry]


@dataclass(frozen=True)
class Tuned:
    """One file.

    Attributes:
        gpu: its name, as torch says it.
        versions: of ``PACKAGES``.
        kernels: by name.
    """

    gpu: str
    versions: dict[str, str]
    kernels: dict[str, Kernel]


def path_of(gpu: str, folder: Path = FOLDER) -> Path:
    """The file of a GPU; "NVIDIA H200" -> fla_nvidia_h200.json."""
    return folder / f"fla_{'_'.join(gpu.lower().split())}.json"


def read(path: Path) -> Tuned:
    """Read a file that ``write`` wrote."""
    held = json.loads(path.read_text())
    kernels = {
        name: Kernel(k["module"], [Entry(**entry) for entry in k["entries"]])
        for name, k in held["kernels"].items()
    }
    return Tuned(held["gpu"], held["versions"], kernels)


def write(tuned: Tuned, path: Path) -> None:
    """Write a file, one entry a line."""
    kernels = []
    for name, kernel in sorted(tuned.kernels.items()):
        lines = sorted(json.dumps(asdict(entry)) for entry in kernel.entries)
        head = f'"module": {json.dumps(kernel.module)}'
        body = ",\n   ".join(lines)
        kernels.append(f'  {json.dumps(name)}: {{{head}, "entries": [\n   {body}]}}')
    path.write_text(
        f'{{"gpu": {json.dumps(tuned.gpu)},\n "versions": {json.dumps(tuned.versions)},\n'
        ' "kernels": {\n' + ",\n".join(kernels) + "\n}}\n"
    )


def installed() -> dict[str, str]:
    """Versions of ``PACKAGES`` in this environment."""
    return {package: version(package) for package in PACKAGES}


def find(gpu: str, folder: Path = FOLDER) -> tuple[Tuned | None, str]:
    """The file for a GPU and this environment, and what to tell people about it."""
    path = path_of(gpu, folder)
    if not path.exists():
        return None, f"not tuned for {gpu}, so fla measures before the first step (make tune)"
    tuned, here = read(path), installed()
    if tuned.versions != here:
        there = ", ".join(f"{name} {tuned.versions[name]}" for name in PACKAGES)
        found = ", ".join(f"{name} {here[name]}" for name in PACKAGES)
        return None, (
            f"tuned with {there}, and this is {found}, so fla measures before the first step "
            "(make tune)"
        )
    return tuned, f"tuned for {gpu}"


def note() -> str:
    """What to tell people about this machine's GPU; "" where there is none."""
    return find(torch.cuda.get_device_name())[1] if torch.cuda.is_available() else ""


_used: int | None = None


def use(shares: bool = True) -> int:
    """Fill the autotuners' dictionaries for this machine's GPU, once per process: the first call
    decides.

    Args:
        shares: see ``seed``.

    Returns:
        How many kernels have entries now.
    """
    global _used
    if _used is None:
        tuned, _ = find(torch.cuda.get_device_name())
        _used = 0 if tuned is None else seed(tuned, shares)
    return _used


def seed(tuned: Tuned, shares: bool = True) -> int:
    """Fill the autotuners of a file's kernels; what they know already stays.

    Args:
        shares: whether ranks that split the heads take what was measured for all of them, where the
            file has nothing for their number: blocks of one head do the same work then.
    """
    from triton import Config

    for name, kernel in tuned.kernels.items():
        tuner = autotuner(kernel.module, name)
        served = [(entry, entry.key) for entry in kernel.entries]
        if shares:
            places = head_places(name, tuner.keys, kernel.entries)
            served += [(entry, key) for one in served for entry, key in shares_of(*one, places)]
        for entry, key in served:
            made = Config(entry.kwargs, num_warps=entry.num_warps, num_stages=entry.num_stages)
            tuner.cache.setdefault(tuple(key), made)
    return len(tuned.kernels)


def head_places(name: str, names: Sequence[str], entries: Sequence[Entry]) -> list[int]:
    """Where a kernel's keys have the number of heads, or the width of all.

    Args:
        names: of what the key is made of; tile sizes that are tuned are in no key.
    """
    wanted = {"D"} if name in CHANNELS else HEADS
    tiles = {tile for entry in entries for tile in entry.kwargs}
    return [i for i, n in enumerate(n for n in names if n not in tiles) if n in wanted]


def shares_of(
    entry: Entry, key: list[Any], places: Sequence[int]
) -> Iterator[tuple[Entry, list[Any]]]:
    """The keys of 2, 4, ... ranks that split the heads, down to an odd share."""
    parts = 2
    while places and all(key[place] % parts == 0 for place in places):
        share = [part // parts if i in places else part for i, part in enumerate(key)]
        yield entry, share
        parts *= 2


def autotuner(module: str, name: str) -> Any:
    """The autotuner around a kernel.

    Raises:
        ValueError: the kernel has none.
    """
    found = getattr(importlib.import_module(module), name)
    while not hasattr(found, "cache") or not hasattr(found, "configs"):
        if not hasattr(found, "fn"):
            raise ValueError(f"{module}.{name} is not tuned by Triton; file and fla do not match")
        found = found.fn
    return found
