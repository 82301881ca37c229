"""The doctor's report, the host's limits behind it, and the pinned versions."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.core import host
from components.titan.device import CpuDevice
from launch import doctor
from launch.doctor import Line, report
from launch.pins import mismatches, pins

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def test_a_healthy_machine_ends_with_ok() -> None:
    text = report([Line("host", "cores", "2"), Line("host", "memory", "8 GiB")])
    assert text.splitlines() == [
        "host",
        "  cores   2",
        "  memory  8 GiB",
        "",
        "OK: nothing is missing.",
    ]


def test_problems_are_marked_counted_and_come_with_one_remedy_each() -> None:
    lines = [
        Line("versions", "torch", "not installed", "make setup"),
        Line("versions", "hydra", "1.2", "make setup"),
        Line("host", "disk", "1 GiB", "free some"),
    ]
    text = report(lines)
    assert "! torch  not installed" in text
    assert text.endswith(
        "3 problems:\n  torch: not installed\n  hydra: 1.2\n    make setup\n"
        "  disk: 1 GiB\n    free some"
    )


def test_the_report_of_this_machine_names_the_pinned_versions() -> None:
    text = report()
    for name, version in pins().items():
        assert f"(pinned: {version})" in next(line for line in text.splitlines() if name in line)
    assert "gloo" in text and "/dev/shm" in text


def test_without_torch_it_says_so_and_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "launch.doctor"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "! torch" in done.stdout
    assert "unknown: torch is not installed" in done.stdout
    assert done.stderr == ""


def test_half_an_environment_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    for name, line in (("torch", "import a_missing_part"), ("hydra", "raise OSError('no .so')")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "launch.doctor"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr == ""
    missing = "ModuleNotFoundError: No module named 'a_missing_part'"
    assert f"unknown: torch cannot be imported ({missing})" in done.stdout
    assert f"broken: {missing} (pinned:" in done.stdout
    assert "broken: OSError: no .so (pinned:" in done.stdout


def test_a_small_disk_and_few_open_files_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "disk_free", lambda folder: GIB)
    monkeypatch.setattr(host, "open_files", lambda: (256, 4096))
    problems = {line.label: line.problem for line in doctor._host() if line.problem}
    assert set(problems) == {"disk", "open files"}


def test_shared_memory_matters_with_several_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "shared_memory", lambda: 64 * 2**20)
    for count, expected in ((1, []), (2, ["/dev/shm"])):
        lines = doctor._communication(count, gloo=True, nccl=False)
        assert [line.label for line in lines if line.problem and line.label != "NCCL"] == expected


def test_a_driver_whose_devices_torch_does_not_see_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor._why_no_cuda("13.0") == ""
    monkeypatch.setattr(host, "nvidia_driver", lambda: "550.1")
    assert "CPU build" in doctor._why_no_cuda(None)
    assert "550.1" in doctor._why_no_cuda("13.0")


def test_devices_and_their_links_are_listed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from launch import links

    device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (139 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(links, "host_links", lambda index: (55.12, 54.0))

    def busy(source: int, target: int) -> tuple[float, bool]:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(links, "peer_link", busy)
    lines = {line.label: line for line in doctor._torch()}
    assert lines["cuda:1"].value == "NVIDIA H200, sm_90, 140.0 GiB (139.0 free)"
    assert lines["NCCL"].value == "2.30.7"
    assert lines["host - cuda:1"].value == "55.1 GB/s to the device, 54.0 GB/s back (pinned)"
    assert lines["cuda:0 - cuda:1"].value == "not measured: CUDA error: out of memory"
    assert lines["cuda:0 - cuda:1"].problem


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hierarchy in place of the machine's, with the files that a test writes."""
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    real = host._read

    def read(file: Path) -> str:
        if file == Path("/proc/self/cgroup"):
            return (tmp_path / "self").read_text().strip()
        return real(file)

    monkeypatch.setattr(host, "_read", read)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def test_memory_is_the_least_that_any_enclosing_group_grants(cgroups: Path) -> None:
    write(
        cgroups, {"self": "0::/job/step", "job/memory.max": str(GIB), "job/step/memory.max": "max"}
    )
    assert host.memory_total() == GIB
    assert host.memory_available() <= GIB
    assert CpuDevice.get_device_properties().total_memory == GIB


def test_what_a_group_uses_is_not_available_but_its_file_cache_is(cgroups: Path) -> None:
    mib = 2**20
    write(
        cgroups,
        {
            "self": "0::/job",
            "job/memory.max": str(100 * mib),
            "job/memory.current": str(70 * mib),
            "job/memory.stat": f"anon 1\ninactive_file {20 * mib}\nactive_file 5",
        },
    )
    assert host.memory_total() == 100 * mib
    assert host.memory_available() == 50 * mib


def test_memory_limits_of_the_first_version_count_too(cgroups: Path) -> None:
    write(cgroups, {"self": "3:memory:/a\n0::/", "memory/a/memory.limit_in_bytes": str(2 * GIB)})
    assert host.memory_total() == 2 * GIB


def test_no_limit_is_the_machines_memory(cgroups: Path) -> None:
    write(
        cgroups,
        {"self": "3:memory:/a\n0::/", "memory/a/memory.limit_in_bytes": "9223372036854771712"},
    )
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.memory_total() == machine


def test_inside_a_container_whose_group_path_is_the_hosts_its_own_root_holds(cgroups: Path) -> None:
    write(cgroups, {"self": "0::/docker/abc", "memory.max": str(GIB)})
    assert host.memory_total() == GIB


@pytest.mark.parametrize(
    "files",
    [
        {"self": "0::/job", "job/cpu.max": "50000 100000"},
        {
            "self": "1:cpu,cpuacct:/job",
            "cpu/job/cpu.cfs_quota_us": "50000",
            "cpu/job/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_a_quota_grants_fractions_of_cores(cgroups: Path, files: dict[str, str]) -> None:
    write(cgroups, files)
    assert host.cores() == 0.5


@pytest.mark.parametrize(
    "files",
    [
        {"self": "0::/job", "job/cpu.max": "max 100000"},
        {"self": "1:cpu:/", "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        {"self": "0::/"},
    ],
)
def test_without_a_quota_all_allowed_cores_count(cgroups: Path, files: dict[str, str]) -> None:
    write(cgroups, files)
    assert host.cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue", "550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release",
            "580.95.05",
        ),
        ("", None),
    ],
)
def test_the_driver_names_its_version(
    monkeypatch: pytest.MonkeyPatch, text: str, version: str | None
) -> None:
    monkeypatch.setattr(host, "_read", lambda file: text)
    assert host.nvidia_driver() == version


def test_pins_are_the_exact_requirements(tmp_path: Path) -> None:
    file = tmp_path / "requirements.in"
    file.write_text("# a==1\ntorch==2.14.1\ndatasets>=3.6,<4.8\nhydra-core==1.3.8  # why\npytest\n")
    assert pins(file) == {"torch": "2.14.1", "hydra-core": "1.3.8"}


def test_the_lock_holds_the_pins_with_hashes_and_no_address() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    for name, version in pins().items():
        assert f"\n{name}=={version} \\\n    --hash=sha256:" in f"\n{lock}"
    assert "://" not in lock
    requirements = [line for line in lock.splitlines() if line[:1].isalnum()]
    assert all(line.endswith("\\") for line in requirements)


def test_missing_and_other_versions_are_told_and_local_suffixes_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"torch": "2.14.1+cu130", "torchtitan": "0.2.0", "hydra-core": None}
    monkeypatch.setattr("launch.pins.installed", found.__getitem__)
    wanted = {"torch": "2.14.1", "torchtitan": "0.3.0", "hydra-core": "1.3.8"}
    assert mismatches(wanted) == [
        "torchtitan==0.3.0 is needed, found 0.2.0",
        "hydra-core==1.3.8 is needed, not found",
    ]


def test_this_environment_has_the_pinned_versions() -> None:
    assert mismatches(pins()) == []
