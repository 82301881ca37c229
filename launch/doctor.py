"""``make doctor``: what this machine has, what is missing, and how to get it.

Runs in any Python, with or without torch and CUDA, and installs nothing.
"""

import importlib
import importlib.util
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components.core import host
from launch.pins import installed, pins, reason_of

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
INSTALL = "make setup installs it into .venv (or: pip install -r requirements.lock)"
OTHERS = ("datasets", "tensorboard", "tilelang", "triton")


@dataclass(frozen=True)
class Line:
    """One fact.

    Attributes:
        section: heading it stands under.
        label: what it is about.
        value: what was found.
        problem: what to do about it; "" when all is well.
    """

    section: str
    label: str
    value: str
    problem: str = ""


def survey() -> list[Line]:
    """Everything the report tells; a few seconds, most of them for importing torch."""
    lines = [*_versions(), *_host()]
    if importlib.util.find_spec("torch") is None:
        return [*lines, Line("devices", "devices", "unknown: torch is not installed")]
    try:
        importlib.import_module("torch")
    except Exception as error:  # half installed: whatever its first lines raise
        unknown = f"unknown: torch cannot be imported ({reason_of(error)})"
        return [*lines, Line("devices", "devices", unknown, INSTALL)]
    return [*lines, *_torch()]


def report(lines: list[Line] | None = None) -> str:
    """The survey as text: aligned facts by section, then the problems, each with its remedy."""
    lines = survey() if lines is None else lines
    width = max(len(line.label) for line in lines)
    text: list[str] = []
    for section in dict.fromkeys(line.section for line in lines):
        text.append(section)
        for line in lines:
            if line.section == section:
                mark = "!" if line.problem else " "
                text.append(f"{mark} {line.label:<{width}}  {line.value}")
        text.append("")
    problems = [line for line in lines if line.problem]
    if not problems:
        return "\n".join([*text, "OK: nothing is missing."])
    text.append(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:")
    for remedy in dict.fromkeys(line.problem for line in problems):
        text += [f"  {line.label}: {line.value}" for line in problems if line.problem == remedy]
        text.append(f"    {remedy}")
    return "\n".join(text)


def main() -> int:
    """Print the report. Exit status: 0 when nothing is missing, else 1."""
    lines = survey()
    print(report(lines))
    return 1 if any(line.problem for line in lines) else 0


def _versions() -> Iterator[Line]:
    python = sys.version_info[:2]
    wrong = "" if (3, 11) <= python <= (3, 13) else "the project runs on Python 3.11 to 3.13"
    yield Line("versions", "python", f"{platform.python_version()} ({sys.executable})", wrong)
    for name, wanted in pins().items():
        found = installed(name)
        same = found is not None and found.partition("+")[0] == wanted
        value = f"{found or 'not installed'} (pinned: {wanted})"
        yield Line("versions", name, value, "" if same else INSTALL)
    for name in OTHERS:
        found = installed(name)
        yield Line("versions", name, found or "not installed", "" if found else INSTALL)
    yield Line("versions", "NVIDIA driver", host.nvidia_driver() or "none")


def _host() -> Iterator[Line]:
    total, free = host.memory_total() / GIB, host.memory_available() / GIB
    yield Line("host", "memory", f"{total:.1f} GiB, {free:.1f} GiB available")
    yield Line("host", "cores", f"{host.cores():g} ({platform.machine()})")
    disk = host.disk_free(ROOT) / GIB
    few = "checkpoints need room: free some, or set output_dir to another disk" if disk < 5 else ""
    yield Line("host", "disk", f"{disk:.0f} GiB free at {ROOT}", few)
    soft, hard = host.open_files()
    low = "raise it: `ulimit -n 65536`" if soft < 1024 else ""
    yield Line("host", "open files", f"{soft} (can be raised to {hard})", low)


def _torch() -> Iterator[Line]:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Line("devices", "torch build", build)
    if count == 0:
        yield Line("devices", "devices", "the CPU alone", _why_no_cuda(torch.version.cuda))
    for device in range(count):
        properties = torch.cuda.get_device_properties(device)
        free = torch.cuda.mem_get_info(device)[0] / GIB
        total = properties.total_memory / GIB
        kind = f"{properties.name}, sm_{properties.major}{properties.minor}"
        yield Line("devices", f"cuda:{device}", f"{kind}, {total:.1f} GiB ({free:.1f} free)")
    yield from _communication(count, dist.is_gloo_available(), dist.is_nccl_available())
    if count:
        yield from _compilers()
        yield from _links(count)


def _why_no_cuda(build: str | None) -> str:
    driver = host.nvidia_driver()
    if driver is None:
        return ""
    if build is None:
        return "there is an NVIDIA driver, but torch is a CPU build; " + INSTALL
    return (
        f"there is an NVIDIA driver ({driver}), but torch (CUDA {build}) sees no device: the "
        "driver may be too old for it, or CUDA_VISIBLE_DEVICES empty; `nvidia-smi` tells more"
    )


def _communication(count: int, gloo: bool, nccl: bool) -> Iterator[Line]:
    missing = "torch was built without it; " + INSTALL
    yield Line("communication", "gloo", "yes" if gloo else "no", "" if gloo else missing)
    if nccl and count:
        import torch

        version = ".".join(str(part) for part in torch.cuda.nccl.version())
        yield Line("communication", "NCCL", version)
    else:
        wanted = "" if nccl or not count else missing
        yield Line("communication", "NCCL", "yes (no device to use it)" if nccl else "no", wanted)
    size = host.shared_memory()
    small = count > 1 and (size or 0) < GIB
    remedy = "ranks exchange data there: start the container with --shm-size=16g" if small else ""
    value = "none" if size is None else f"{size / GIB:.1f} GiB"
    yield Line("communication", "/dev/shm", value, remedy)


def _compilers() -> Iterator[Line]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    need = "Triton compiles its launchers with it; Debian, Ubuntu: apt install gcc"
    yield Line("compilers", "C compiler", compiler or "none", "" if compiler else need)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    version = "{}.{}".format(*sys.version_info[:2])
    need = f"Triton compiles against it; Debian, Ubuntu: apt install python{version}-dev"
    value = str(header) if header.is_file() else "not found"
    yield Line("compilers", "Python.h", value, "" if header.is_file() else need)
    yield Line("compilers", "nvcc", shutil.which("nvcc") or "none (only TileLang kernels need it)")


def _links(count: int) -> Iterator[Line]:
    from launch.links import host_links, peer_link

    for device in range(count):
        label = f"host - cuda:{device}"
        try:
            up, down = host_links(device)
        except RuntimeError as error:
            yield _unmeasured(label, error)
            continue
        yield Line("links", label, f"{up:.1f} GB/s to the device, {down:.1f} GB/s back (pinned)")
    for device in range(1, count):
        label = f"cuda:0 - cuda:{device}"
        try:
            rate, direct = peer_link(0, device)
        except RuntimeError as error:
            yield _unmeasured(label, error)
            continue
        yield Line("links", label, f"{rate:.1f} GB/s, {'direct' if direct else 'through the host'}")


def _unmeasured(label: str, error: RuntimeError) -> Line:
    reason = str(error).splitlines()[0]
    return Line("links", label, f"not measured: {reason}", "is something else using the device?")


if __name__ == "__main__":
    sys.exit(main())
