"""Create a run directory and record what a run needs to be understood, replayed, continued."""

import contextlib
import copy
import datetime
import getpass
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from components.core.problems import Problem, RecipeError
from components.core.recipe import Recipe
from launch.config import freeze
from launch.config.compose import Composed
from launch.config.groups import ROOT
from launch.rundir import FROZEN, STATUS, RunDir

PACKAGES = ("torch", "torchtitan", "hydra-core", "omegaconf", "triton", "datasets", "tilelang")


def new_path(recipe: Recipe, composed: Composed) -> Path:
    """Where a run started now would live: ``<output_dir>/<recipe>/<time>-<hash>``."""
    plain = json.dumps(freeze.to_plain(recipe), sort_keys=True)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{hashlib.sha256(plain.encode()).hexdigest()[:6]}"
    return Path(recipe.output_dir).resolve() / run_name(composed.path) / name


def run_name(recipe: Path) -> str:
    """Folder for the runs of a recipe; a replay goes where the run that it replays is."""
    if recipe.name == FROZEN and (recipe.parent / "versions.json").is_file():
        return recipe.parent.parent.name
    return recipe.stem


def create(recipe: Recipe, composed: Composed, command: list[str]) -> RunDir:
    """Make a new run directory and record the run in it.

    Two runs started in the same second get different directories: creation is exclusive.
    """
    wanted = new_path(recipe, composed)
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            [Problem("output_dir", f"cannot create {wanted.parent}: {error.strerror}")]
        ) from None
    for attempt in range(1000):
        path = wanted.with_name(wanted.name + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir()
        except FileExistsError:
            continue
        run = RunDir(path)
        record(run, recipe, composed, command)
        return run
    raise RuntimeError(f"output_dir: cannot create a new run directory in {wanted.parent}")


def record(run: RunDir, recipe: Recipe, composed: Composed, command: list[str]) -> None:
    """Write the frozen recipe, its source, the overrides, versions and git state.

    On a continued run the previous files move to ``history/`` first.
    """
    _archive(run)
    run.logs.mkdir(exist_ok=True)
    overrides = " ".join(composed.overrides) or "(none)"
    header = [
        f"Resolved from {composed.path} with overrides: {overrides}",
        "Complete and stand-alone: run it again with `make train RECIPE=<this file>`.",
    ]
    replayed = copy.deepcopy(recipe)
    # Where this launch began is no part of the run; a replay begins at its beginning.
    replayed.checkpoint.resume, replayed.checkpoint.load_step = None, -1
    freeze.write(replayed, run.frozen, header)
    shutil.copyfile(composed.path, run.path / "source.yaml")
    (run.path / "overrides.txt").write_text("".join(f"{o}\n" for o in composed.overrides))
    (run.path / "versions.json").write_text(json.dumps(environment(command), indent=2) + "\n")


@contextlib.contextmanager
def only_launch_of(run: RunDir) -> Iterator[None]:
    """Hold a run directory for one launch at a time.

    Raises:
        RecipeError: another launch is at work in it.
    """
    lock = FileLock(run.path / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        message = f"{run.path} is still running"
        hint = "stop that launch first, or start a run of its own without checkpoint.resume"
        raise RecipeError([Problem("checkpoint.resume", message, hint)]) from error
    try:
        yield
    finally:
        lock.release()


def _archive(run: RunDir) -> None:
    if not run.frozen.is_file():
        return
    history = run.path / "history"
    number = len(list(history.glob("*"))) + 1
    target = history / f"{number:03d}"
    target.mkdir(parents=True)
    for name in (FROZEN, "source.yaml", "overrides.txt", "versions.json", STATUS):
        file = run.path / name
        if file.is_file():
            shutil.move(file, target / name)


def environment(command: list[str]) -> dict[str, Any]:
    """Versions, host and git state of this process."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "host": socket.gethostname(),
        "user": user(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": versions,
        "git": git_state(),
    }


def user() -> str:
    """Name of who runs this process, or the number where the system knows no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def git_state() -> dict[str, Any] | None:
    """Commit and uncommitted files of the project; None outside a git checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain").splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit, "uncommitted": changed[:50], "uncommitted_count": len(changed)}


def _git(*args: str) -> str:
    done = subprocess.run(
        ["git", *args], cwd=ROOT, check=True, capture_output=True, text=True, timeout=20
    )
    return done.stdout.strip()
