"""`make train` as a user runs it: processes, signals, crashes, replay."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from launch.config.groups import ROOT
from launch.rundir import RunDir
from tests.training import losses, metrics, small_overrides, write_corpus

pytestmark = pytest.mark.distributed

STEPS = 24


def settings(folder: Path) -> list[str]:
    return [
        *small_overrides(folder / "corpus"),
        "parallelism.expert_parallel_degree=2",
        f"training.steps={STEPS}",
        f"lr_scheduler.total_steps={STEPS}",
        # Long enough steps for a signal to find the run at work.
        "training.seq_len=1024",
        "checkpoint.interval=4",
        f"output_dir={folder}/outputs",
    ]


def start(recipe: str, ranks: int, overrides: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "launch", "train", "--recipe", recipe, "--ngpu", str(ranks)]
    return subprocess.Popen(
        [*command, "--", *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A failing test must not leave ranks behind.
        process_group=0,
    )


def finish(process: subprocess.Popen, limit: float = 120) -> str:
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output


def wait_for_step(base: Path, step: int, limit: float = 90, folder: str = "outputs") -> Path:
    """The run directory, once its newest run has reported ``step``."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        for run in (base / folder).glob("*/*"):
            if (run / "metrics.jsonl").is_file() and metrics(run)[-1]["step"] >= step:
                return run
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached in {limit} s")


def by_step(run: Path) -> dict[int, float]:
    """Loss of each step; a step that was trained again counts once, as it was last."""
    return {int(line["step"]): line["train/loss"] for line in metrics(run)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An uninterrupted run on two ranks: its directory and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    write_corpus(folder / "corpus")
    process = start("quickstart", 2, settings(folder))
    output = finish(process)
    assert process.returncode == 0, output
    return next((folder / "outputs/quickstart").iterdir()), output


def test_the_end_says_where_things_are(finished: tuple[Path, str]) -> None:
    run, output = finished
    assert f"done after {STEPS} steps" in output
    assert str(run / f"checkpoint/step-{STEPS}") in output
    assert "-m tensorboard.main --logdir" in output
    assert f"step {STEPS}/{STEPS} | loss" in output
    assert " | data " in output and " | eta " in output


def test_the_run_directory_tells_the_whole_story(finished: tuple[Path, str]) -> None:
    run, _ = finished
    frozen = yaml.safe_load((run / "recipe.yaml").read_text())
    assert frozen["training"]["steps"] == STEPS
    assert "training.seq_len=1024" in (run / "overrides.txt").read_text().splitlines()
    versions = json.loads((run / "versions.json").read_text())
    assert versions["packages"]["torchtitan"] == "0.3.0"
    assert (run / "source.yaml").read_text() == (ROOT / "recipes/quickstart.yaml").read_text()
    assert RunDir(run).read_status() == {"state": "done", "step": STEPS, "signal": None}
    assert (run / "logs/rank_1.log").is_file()


def test_a_run_directory_replays_to_the_bit(finished: tuple[Path, str]) -> None:
    run, _ = finished
    process = start(str(run / "recipe.yaml"), 2, ["training.steps=3", f"output_dir={run}/again"])
    output = finish(process)
    assert process.returncode == 0, output
    again = next((run / "again/quickstart").iterdir())
    assert losses(again) == losses(run)[:3]


def test_a_stop_and_a_crash_later_the_run_is_the_same_to_the_bit(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus")
    # Same corpus files elsewhere would be another corpus; the run must read the same ones.
    run, _ = finished
    corpus_folder = run.parents[2]
    overrides = [*settings(corpus_folder), f"output_dir={tmp_path}/outputs"]

    process = start("quickstart", 2, overrides)
    stopped = wait_for_step(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "SIGTERM: stopping after this step; a second Ctrl-C stops at once" in output
    assert "stopped by SIGTERM after step" in output
    assert max(RunDir(stopped).checkpoints()) == RunDir(stopped).read_status()["step"]

    process = start("quickstart", 2, [*overrides, "checkpoint.resume=latest"])
    wait_for_step(tmp_path, max(RunDir(stopped).checkpoints()) + 6)
    ranks = psutil.Process(process.pid).children()
    ranks[-1].send_signal(signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1, output
    assert "failed: killed with signal 9" in output
    assert not any(rank.is_running() for rank in ranks)

    process = start("quickstart", 2, [*overrides, "checkpoint.resume=latest"])
    output = finish(process)
    assert process.returncode == 0, output
    assert by_step(stopped) == by_step(run)
    # What is on record replays the run from its beginning.
    frozen = yaml.safe_load((stopped / "recipe.yaml").read_text())
    assert frozen["checkpoint"]["resume"] is None
    assert frozen["training"]["global_batch_size"] == 4
    assert len(list((stopped / "history").iterdir())) == 2


def test_ctrl_c_saves_and_the_printed_command_continues(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    run, _ = finished
    overrides = [*settings(run.parents[2]), f"output_dir={tmp_path}/out puts", "training.steps=12"]
    process = start("quickstart", 2, overrides)
    stopped = wait_for_step(tmp_path, 2, folder="out puts")
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 128 + signal.SIGINT, output
    (command,) = [line for line in output.splitlines() if line.startswith("continue")]
    _, _, recipe, resume = shlex.split(command)[1:5]
    process = start(recipe.partition("=")[2], 2, [resume.replace(" ", "\\ ")])
    output = finish(process)
    assert process.returncode == 0, output
    assert by_step(stopped) == {k: v for k, v in by_step(run).items() if k <= 12}


@pytest.mark.slow
def test_another_recipe_cannot_continue_a_run(finished: tuple[Path, str]) -> None:
    run, _ = finished
    overrides = [
        *settings(run.parents[2]),
        f"checkpoint.resume={run}",
        "training.steps=48",
        "optimizer.lr=0.5",
        "model.n_layers=3",
    ]
    process = start("quickstart", 2, overrides)
    output = finish(process)
    assert process.returncode == 2
    assert "model.n_layers: 2 in the run, 3 now" in output
    assert "optimizer.lr: 0.002 in the run, 0.5 now" in output
    assert f"checkpoint.initial_load_path={run}/checkpoint/step-{STEPS}" in output


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_continue(finished: tuple[Path, str]) -> None:
    run, _ = finished
    process = start("quickstart", 2, [*settings(run.parents[2]), f"checkpoint.resume={run}"])
    output = finish(process)
    assert process.returncode == 2
    assert f"training.steps: {STEPS} steps are already done" in output
