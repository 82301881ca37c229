"""How ``.venv`` comes to be, with stand-ins for Python and pip: no network, no real packages."""

import hashlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Understands what bootstrap.sh asks of an interpreter; files in $FAKE steer it.
PYTHON = """#!/bin/sh
case "$*" in
"-c import ensurepip"*) [ ! -e "$FAKE/no-ensurepip" ] ;;
-c\\ *version_info\\[:2\\]\\)\\)*|-c\\ *print*) echo 3.11 ;;
-c*) [ ! -e "$FAKE/too-old" ] ;;
"-m venv"*) shift 2; [ "$1" = --clear ] && shift && rm -rf "$1"
            mkdir -p "$1/bin" && cp "$0" "$1/bin/python"; echo venv >>"$FAKE/calls" ;;
"-m pip --version") ;;
"-m pip install"*) echo "$*" >>"$FAKE/calls"
            if [ -e "$FAKE/pip-waits" ]; then touch "$FAKE/pip-started"; sleep 30; fi
            if [ -e "$FAKE/pip-fails" ]; then echo "ERROR: hashes do not match"; exit 1; fi ;;
"-m compileall"*) echo compile >>"$FAKE/calls"; exit 1 ;;
-V) echo "Python 3.9.1" ;;
esac
"""

# Free space in 1 KiB blocks comes from $FAKE/free; the device's name may hold blanks.
DF = """#!/bin/sh
echo "Filesystem 1024-blocks Used Available Capacity Mounted on"
echo "//nas/my share 98000000    1000   $(cat "$FAKE/free")   91% /some where"
"""

TOOLS = ["sh", "cat", "cut", "cp", "date", "flock", "grep", "mkdir", "mv", "rm", "sha256sum"]
TOOLS += ["sed", "sleep", "tail", "touch"]


class Machine:
    """A project folder and a PATH whose only Python is the stand-in."""

    def __init__(self, root: Path) -> None:
        self.root, self.fake, tools = root / "project", root / "fake", root / "bin"
        for folder in (self.root / "launch", self.fake, tools):
            folder.mkdir(parents=True)
        shutil.copy(ROOT / "launch/bootstrap.sh", self.root / "launch")
        self.lock("torch==1 --hash=sha256:0\n")
        (tools / "python3").write_text(PYTHON)
        (tools / "python3").chmod(0o755)
        (tools / "df").write_text(DF)
        (tools / "df").chmod(0o755)
        self.free(20)
        for tool in TOOLS:
            (tools / tool).symlink_to(shutil.which(tool) or tool)
        self.env = {"PATH": str(tools), "FAKE": str(self.fake)}

    def lock(self, text: str) -> None:
        (self.root / "requirements.lock").write_text(text)

    def free(self, gigabytes: int) -> None:
        (self.fake / "free").write_text(f"{gigabytes * 1_000_000}")

    def set(self, flag: str, on: bool = True) -> None:
        (self.fake / flag).touch() if on else (self.fake / flag).unlink()

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", "launch/bootstrap.sh", *words],
            cwd=self.root,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        log = self.fake / "calls"
        names = [line.split()[2 if "pip" in line else 0] for line in log.read_text().splitlines()]
        log.write_text("")
        return names

    @property
    def stamp(self) -> Path:
        return self.root / ".venv/installed.sha256"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_run_installs_with_hashes_and_says_so(machine: Machine) -> None:
    code, out, err = machine.run("install")
    assert (code, err) == (0, "")
    assert out.startswith("Installing 1 locked packages into .venv")
    log = (machine.fake / "calls").read_text()
    assert "--no-compile --require-hashes -r requirements.lock" in log
    lock = (machine.root / "requirements.lock").read_bytes()
    assert machine.stamp.read_text().strip() == hashlib.sha256(lock).hexdigest()


def test_the_second_run_does_nothing_and_is_silent(machine: Machine) -> None:
    machine.run("install")
    machine.calls()
    assert machine.run("install") == (0, "", "")
    assert machine.calls() == []


def test_a_changed_lock_updates_the_same_environment(machine: Machine) -> None:
    machine.run("install")
    assert machine.calls() == ["venv", "install", "compile"]
    machine.lock("torch==2 --hash=sha256:0\n")
    assert machine.run("install")[0] == 0
    assert machine.calls() == ["install", "compile"]


def test_too_little_space_is_refused_before_anything_is_installed(machine: Machine) -> None:
    machine.free(6)
    code, _, err = machine.run("install")
    assert code == 2
    assert "need 7 GB" in err and "6 GB are free" in err and "PYTHON=" in err
    assert not (machine.root / ".venv").exists()


def test_an_update_in_place_asks_for_no_space(machine: Machine) -> None:
    machine.run("install")
    machine.free(1)
    machine.lock("torch==2 --hash=sha256:0\n")
    assert machine.run("install")[0] == 0


def test_a_failed_install_shows_pips_words_and_leaves_no_stamp(machine: Machine) -> None:
    machine.set("pip-fails")
    code, _, err = machine.run("install")
    assert code == 2
    assert "ERROR: hashes do not match" in err
    assert "The installation failed" in err
    assert not machine.stamp.exists()


def test_an_interrupted_install_is_done_again_from_nothing(machine: Machine) -> None:
    machine.set("pip-waits")
    process = machine.start("install")
    deadline = time.monotonic() + 20
    while not (machine.fake / "pip-started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not machine.stamp.exists()
    assert machine.calls() == ["venv", "install"]
    machine.set("pip-waits", on=False)
    assert machine.run("install")[0] == 0
    assert machine.calls() == ["venv", "install", "compile"]
    assert machine.stamp.exists()


def test_two_first_runs_at_once_install_once(machine: Machine) -> None:
    first, second = machine.start("install"), machine.start("install")
    assert [p.wait(timeout=30) for p in (first, second)] == [0, 0]
    for process in (first, second):
        process.communicate()
    assert machine.calls() == ["venv", "install", "compile"]


def test_an_interpreter_that_went_away_is_replaced(machine: Machine) -> None:
    machine.run("install")
    machine.calls()
    (machine.root / ".venv/bin/python").unlink()
    assert machine.run("install")[0] == 0
    assert machine.calls() == ["venv", "install", "compile"]


def test_an_old_python_is_refused_with_what_to_install(machine: Machine) -> None:
    machine.set("too-old")
    for verb in ("install", "find"):
        code, out, err = machine.run(verb)
        assert (code, out) == (2, "")
        assert "No Python 3.11, 3.12 or 3.13 on PATH (python3: Python 3.9.1)" in err
        assert "make train PYTHON=" in err


def test_a_python_without_ensurepip_names_the_package_to_install(machine: Machine) -> None:
    machine.set("no-ensurepip")
    code, _, err = machine.run("install")
    assert code == 2
    assert "apt install python3.11-venv" in err


def test_check_refuses_a_program_that_is_not_there(machine: Machine) -> None:
    assert machine.run("check", "/no/such/python")[0] == 2


def test_check_refuses_an_unsupported_python(machine: Machine) -> None:
    machine.set("too-old")
    code, _, err = machine.run("check", "python3")
    assert code == 2
    assert "PYTHON=python3 is Python 3.9.1; the project runs on Python 3.11 to 3.13" in err


def test_find_prefers_the_projects_own_environment(machine: Machine) -> None:
    assert machine.run("find")[1].strip().endswith("bin/python3")
    machine.run("install")
    assert machine.run("find")[1].strip() == ".venv/bin/python"
