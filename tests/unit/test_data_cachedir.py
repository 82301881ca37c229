"""A shared cache directory: built once, whole or absent, damage found."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data import cachedir
from data.cachedir import META, build_once, find_fault, read_meta

VERSION = 1
ROOT = Path(__file__).parents[2]

BUILDER = """
import sys, time
from pathlib import Path
from data.cachedir import build_once
directory, log, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

def build(scratch):
    with open(log, "a") as file:
        file.write("built\\n")
    (scratch / "half.bin").write_bytes(b"first half")
    time.sleep(seconds)
    (scratch / "data.bin").write_bytes(b"whole")
    return {"answer": 42}

build_once(directory, 1, build)
assert (directory / "data.bin").read_bytes() == b"whole"
"""


def start_builder(directory: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", BUILDER, str(directory), str(log), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT)


def write_some(scratch: Path) -> dict[str, Any]:
    (scratch / "data.bin").write_bytes(bytes(range(256)) * 40)
    (scratch / "empty.bin").write_bytes(b"")
    return {"answer": 42}


def refuse(scratch: Path) -> dict[str, Any]:
    raise AssertionError("built again without need")


def test_a_good_directory_is_not_built_again(tmp_path: Path) -> None:
    directory = tmp_path / "outputs" / "cache"
    assert find_fault(directory, VERSION) == f"no {META}"
    build_once(directory, VERSION, write_some)
    build_once(directory, VERSION, refuse)
    assert find_fault(directory, VERSION) is None
    assert read_meta(directory)["answer"] == 42
    assert {path.name for path in directory.iterdir()} == {"data.bin", "empty.bin", META}


def truncate(directory: Path) -> None:
    os.truncate(directory / "data.bin", 10_000)


def flip(directory: Path) -> None:
    with (directory / "data.bin").open("r+b") as file:
        file.seek(5_000)
        file.write(b"\x00\x00")


def remove(directory: Path) -> None:
    (directory / "empty.bin").unlink()


def cut_meta(directory: Path) -> None:
    os.truncate(directory / META, 20)


def drop_meta(directory: Path) -> None:
    (directory / META).unlink()


def age(directory: Path) -> None:
    meta = {**read_meta(directory), "version": 0}
    (directory / META).write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (truncate, "data.bin has 10000 bytes instead of 10240"),
        (flip, "data.bin has changed contents"),
        (remove, "empty.bin is missing"),
        (cut_meta, "meta.json is not readable"),
        (drop_meta, "no meta.json"),
        (age, "layout version 0 instead of 1"),
    ],
)
def test_damage_is_named_and_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, fault: str
) -> None:
    directory = tmp_path / "cache"
    build_once(directory, VERSION, write_some)
    damage(directory)
    assert find_fault(directory, VERSION) == fault
    with caplog.at_level(logging.WARNING):
        build_once(directory, VERSION, write_some)
    assert f"{directory} is damaged ({fault}); building it again" in caplog.text
    assert find_fault(directory, VERSION) is None


@pytest.mark.parametrize(("blocks", "checked"), [(1, 1), (16, 16), (17, 16), (1000, 16)])
def test_large_files_are_sampled_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, checked: int
) -> None:
    monkeypatch.setattr(cachedir, "_BLOCK_BYTES", 4)
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(4 * blocks))
    checksums = cachedir._describe_file(path)["crc32"]
    assert len(checksums) == blocks
    noticed = []
    for block in range(blocks):
        wrong = [*checksums[:block], 1, *checksums[block + 1 :]]
        noticed.append(not cachedir._same_blocks(path, wrong))
    assert sum(noticed) == checked
    assert noticed[0] and noticed[-1]


def test_a_failed_build_leaves_no_directory(tmp_path: Path) -> None:
    directory = tmp_path / "cache"

    def fail(scratch: Path) -> dict[str, Any]:
        write_some(scratch)
        raise ValueError("document 7 cannot be read")

    with pytest.raises(ValueError, match="document 7 cannot be read"):
        build_once(directory, VERSION, fail)
    assert not directory.exists()
    build_once(directory, VERSION, write_some)
    assert find_fault(directory, VERSION) is None


def test_of_many_processes_one_builds_and_all_use_it(tmp_path: Path) -> None:
    directory, log = tmp_path / "cache", tmp_path / "log"
    builders = [start_builder(directory, log, 0.3) for _ in range(4)]
    assert [builder.wait(timeout=60) for builder in builders] == [0] * 4
    assert log.read_text() == "built\n"


def test_a_killed_build_is_swept_away_by_the_next(tmp_path: Path) -> None:
    directory, log = tmp_path / "cache", tmp_path / "log"
    killed = start_builder(directory, log, 60)
    half = tmp_path / "cache.building" / "half.bin"
    deadline = time.monotonic() + 30
    while not half.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=30)
    assert half.exists()
    assert not directory.exists()
    build_once(directory, VERSION, write_some)
    assert find_fault(directory, VERSION) is None
    assert not half.parent.exists()
    assert not (directory / "half.bin").exists()


def test_who_waits_long_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory, log = tmp_path / "cache", tmp_path / "log"
    monkeypatch.setattr(cachedir, "_LOCK_REPORT_SECONDS", 0.05)
    builder = start_builder(directory, log, 0.4)
    while not log.exists():
        time.sleep(0.01)
    with caplog.at_level(logging.INFO):
        build_once(directory, VERSION, refuse)
    assert f"waiting for another process to build data cache {directory}" in caplog.text
    assert builder.wait(timeout=30) == 0
