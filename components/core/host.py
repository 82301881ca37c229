"""What the operating system grants this process: memory, cores, disk. Standard library alone.

A container or job often gets less than the machine has; the limits of control groups (both
versions) are honoured.
"""

import math
import os
import re
import resource
import shutil
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60
"""Version 1 writes "no limit" as a number near 2^63."""


def memory_total() -> int:
    """Bytes of host memory that this process may use."""
    return min([_meminfo("MemTotal"), *_limits("memory", "memory.max", "memory.limit_in_bytes")])


def memory_available() -> int:
    """Bytes of host memory that this process can still get: free, or caches that can be freed."""
    return min([_meminfo("MemAvailable"), *_left_by_limits()])


def cores() -> float:
    """CPU cores that this process may use; a quota can grant fractions."""
    return min(float(len(os.sched_getaffinity(0))), core_quota())


def core_quota() -> float:
    """CPU cores' worth of time that control groups grant this process and all others in them;
    infinite without a limit."""
    quotas = [math.inf]
    for folder in _folders("cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) != 2:
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if all(word.isdigit() for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas)


def disk_free(folder: Path) -> int:
    """Bytes free for this user on the file system of ``folder``."""
    return shutil.disk_usage(folder).free


def shared_memory() -> int | None:
    """Size of /dev/shm in bytes; None where there is none."""
    folder = Path("/dev/shm")
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def open_files() -> tuple[int, int]:
    """Soft and hard limit on open files of one process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def nvidia_driver() -> str | None:
    """Version of the loaded NVIDIA kernel driver; None without one."""
    text = _read(Path("/proc/driver/nvidia/version"))
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+[\d.]*)", text)
    return match[1] if match else None


def _meminfo(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/meminfo has no {key}")
    return int(match[1]) * 1024


def _left_by_limits() -> list[int]:
    """What each control group's limit leaves, its cached files counted as free."""
    left = []
    for folder in _folders("memory"):
        for limit_in, used_in in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(folder / limit_in), _read(folder / used_in)
            if not limit.isdigit() or int(limit) >= _UNLIMITED:
                continue
            cached = re.search(
                r"^inactive_file (\d+)$", _read(folder / "memory.stat"), re.MULTILINE
            )
            left.append(max(0, int(limit) - int(used or 0) + (int(cached[1]) if cached else 0)))
    return left


def _limits(controller: str, *names: str) -> list[int]:
    texts = [_read(folder / name) for folder in _folders(controller) for name in names]
    return [int(text) for text in texts if text.isdigit() and int(text) < _UNLIMITED]


def _folders(controller: str) -> list[Path]:
    """Control groups of this process that may limit ``controller``, up to the topmost."""
    found = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        folder = root / path.lstrip("/")
        # Inside a container the path may be the host's; the container's own root then holds.
        found += [f for f in (folder, *folder.parents) if f.is_relative_to(root) and f.is_dir()]
    return found


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
