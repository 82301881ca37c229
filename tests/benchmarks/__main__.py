"""Command line: ``python -m tests.benchmarks NAME [--device ...] [--size ...]``.

Exit codes: 0 measured; 1 a variant computed a wrong result or one of ours failed; 2 usage.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from components.titan.device import resolve_device
from tests.benchmarks import cases, report
from tests.benchmarks.case import Case
from tests.benchmarks.fetched import Fetched
from tests.benchmarks.harness import GateError, Options, Report, run_case
from tests.benchmarks.machine import survey
from tests.benchmarks.probes import Device, make_probe
from tests.benchmarks.usage import UsageError, choose

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str]) -> int:
    """Run the command line ``arguments`` (without the program name); return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.list or not arguments:
            _print_list()
            return 0
        return _bench(options, command=shlex.join(["python", "-m", "tests.benchmarks", *arguments]))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", help="a case; see --list")
    parser.add_argument("--list", action="store_true", help="list the cases and their sizes")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    parser.add_argument("--size", default="small", help="one of the case's sizes (default: small)")
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds (default: 10)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed rounds (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
    parser.add_argument("--peers", type=Path, help="folder of fetched kernels of others")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser


def _print_list() -> None:
    for name in cases.names():
        case = cases.load(name)
        print(f"{name}: {case.question} (sizes: {', '.join(case.sizes)})")


def _bench(options: argparse.Namespace, command: str) -> int:
    if options.name is None:
        raise UsageError(f"NAME: missing (legal: {', '.join(cases.names())})")
    case = cases.load(options.name)
    device = _device(options.device)
    size_name = _size(case, options.size, device)
    for flag, least in (("repeats", 1), ("warmup", 0)):
        if getattr(options, flag) < least:
            raise UsageError(f"--{flag}: {getattr(options, flag)} is too few, at least {least}")
    if options.peers is not None and not options.peers.is_dir():
        raise UsageError(f"--peers: {str(options.peers)!r} is not a folder (see README.md)")
    probe = make_probe(device)
    print(f"measuring the ceilings of the {device}", file=sys.stderr, flush=True)
    machine = survey(probe)
    settings = Options(warmup=options.warmup, repeats=options.repeats, seed=options.seed)
    fetched = Fetched(folder=options.peers)
    measured = run_case(case, size_name, probe, machine, settings, peers=fetched)
    paths = report.write(measured, options.out, command, datetime.now(UTC))
    print(report.to_text(measured))
    print("\nwritten: " + ", ".join(str(path) for path in paths))
    return _exit_code(measured)


def _device(wanted: str) -> Device:
    kind = choose(wanted, ("cpu", "cuda", "auto"), "--device")
    try:
        return resolve_device(kind)  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(f"{error}; here: {os.cpu_count()} CPUs, no GPU") from error


def _size(case: Case, wanted: str, device: Device) -> str:
    name = choose(wanted, case.sizes, "--size")
    if device not in case.sizes[name].devices:
        here = [key for key, size in case.sizes.items() if device in size.devices]
        raise UsageError(
            f"--size: {name!r} of {case.name!r} runs on "
            f"{' or '.join(case.sizes[name].devices)}, not on {device} (legal: {', '.join(here)})"
        )
    return name


def _exit_code(measured: Report) -> int:
    for result in measured.results:
        if result.status == "wrong":
            return 1
        if result.status == "failed" and result.variant.role == "ours":
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
