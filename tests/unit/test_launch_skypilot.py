"""The SkyPilot task: valid YAML whose commands bash can read and that start the frozen recipe."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from components.core.problems import RecipeError
from launch.skypilot import SkyPilotSettings, task


def make(run_dir: Path, nodes: int = 1, gpus: int = 8, **settings: object) -> dict:
    text = task(
        run_dir,
        SkyPilotSettings(**settings),  # type: ignore[arg-type]
        nodes=nodes,
        gpus_per_node=gpus,
        job_name="moe-1",
        root=Path("/project"),
    )
    return yaml.safe_load(text)


def test_it_asks_for_the_machines_of_the_run() -> None:
    found = make(Path("/runs/moe/a"), nodes=2, gpus=4, storage="s3://b", infra="aws/us-east-1")
    assert (found["name"], found["num_nodes"]) == ("moe-1", 2)
    assert found["resources"]["accelerators"] == "H200:4"
    assert found["resources"]["infra"] == "aws/us-east-1"
    assert "memory" not in found["resources"]


def test_the_project_and_the_frozen_recipe_travel_with_the_task() -> None:
    found = make(Path("/runs/moe/a"), storage="gs://bucket/x")
    assert found["workdir"] == "/project"
    assert found["file_mounts"]["~/frozen-run"] == "/runs/moe/a"
    assert found["file_mounts"]["~/outputs"] == {"source": "gs://bucket/x", "mode": "MOUNT"}


def test_machines_install_the_locked_packages_unless_an_interpreter_is_named() -> None:
    found = make(Path("/runs/moe/a"), setup=["apt-get install -y make"])
    assert found["setup"].splitlines() == ["apt-get install -y make", "make setup"]
    assert "setup" not in make(Path("/runs/moe/a"), python="/opt/python")


def test_blocks_of_lines_stay_readable() -> None:
    run_dir = Path("/runs/moe/a")
    text = task(
        run_dir, SkyPilotSettings(), nodes=1, gpus_per_node=8, job_name="j", root=Path("/p")
    )
    assert "\nrun: |\n  PYTHON=.venv/bin/python\n" in text


@pytest.mark.parametrize("name", ["a", 'it\'s $HOME 50% "x"', "\u00fc"])
def test_each_machine_starts_the_worker_on_its_copy_of_the_run(tmp_path: Path, name: str) -> None:
    found = make(Path("/runs") / name / "r 1", nodes=2, storage="s3://b", python="printf")
    (tmp_path / "frozen-run").mkdir()
    (tmp_path / "frozen-run/recipe.yaml").write_text("new")
    kept = tmp_path / "outputs" / name / "r 1"
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    env |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_TASK_ID": "t-1"}
    # As printf, the "interpreter" shows its arguments: its format is the first of them.
    run = found["run"].replace('"$PYTHON" -u -m', "printf '%s\\n' -u -m")
    done = subprocess.run(["bash", "-c", run], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.splitlines()
    pairs = dict(zip(words, words[1:], strict=False))
    assert (pairs["--nnodes"], pairs["--nproc-per-node"]) == ("2", "8")
    assert (pairs["--rdzv-endpoint"], pairs["--rdzv-id"]) == ("10.0.0.1:29500", "t-1")
    assert words[-3:] == ["-m", "launch.worker", str(kept)]
    assert (kept / "recipe.yaml").read_text() == "new"


def test_a_replaced_machine_keeps_what_the_run_has_written(tmp_path: Path) -> None:
    found = make(Path("/runs/moe/a"), python="true")
    (tmp_path / "frozen-run").mkdir()
    (tmp_path / "frozen-run/status.json").write_text("old")
    kept = tmp_path / "outputs/moe/a"
    kept.mkdir(parents=True)
    (kept / "status.json").write_text("written by the run")
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SKYPILOT_NODE_IPS": "h"}
    subprocess.run(["bash", "-c", found["run"]], env=env, check=True, capture_output=True)
    assert (kept / "status.json").read_text() == "written by the run"


def test_several_machines_without_shared_storage_are_refused() -> None:
    with pytest.raises(RecipeError) as refusal:
        make(Path("/runs/moe/a"), nodes=2)
    assert str(refusal.value) == (
        "launch.skypilot.storage: null, but the 2 machines of this run share its directory\n"
        "    name a bucket such as s3://my-bucket/runs"
    )


def test_numbers_below_one_and_line_breaks_are_the_problem_of_their_key() -> None:
    cases = {
        "NODES": {"nodes": 0},
        "NGPU": {"gpus": 0},
        "launch.skypilot.python": {"python": "a\nb"},
    }
    for key, changes in cases.items():
        with pytest.raises(RecipeError) as refusal:
            make(Path("/runs/moe/a"), **changes)  # type: ignore[arg-type]
        assert [problem.path for problem in refusal.value.problems] == [key]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"storage": "/mnt/x"}, "storage is '/mnt/x'; it must be a bucket"),
        ({"use_spot": True}, "use_spot is true and storage null"),
        ({"port": 1}, "port is 1; it must be between 1024 and 65535"),
        ({"disk_size": 0}, "disk_size is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SkyPilotSettings(**settings)
