"""The batch script: what it asks for, and what it does when run with stand-ins for SLURM."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from components.core.problems import RecipeError
from launch.slurm import SlurmSettings, script, seconds

ODD = 'runs it\'s $HOME 50% "x"'


def make(run_dir: Path, nodes: int = 2, gpus: int = 8, **settings: object) -> str:
    return script(
        run_dir,
        SlurmSettings(**settings),  # type: ignore[arg-type]
        nodes=nodes,
        gpus_per_node=gpus,
        job_name="moe-1",
        python="/opt/python",
        root=Path("/project"),
    )


def options(text: str) -> list[str]:
    prefix = "#SBATCH "
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def test_it_asks_for_the_nodes_and_devices_of_the_run() -> None:
    asked = options(make(Path("/runs/a"), nodes=4, gpus=8, partition="h200", account="lab"))
    expected = {"--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=1", "--job-name=moe-1"}
    expected |= {"--partition=h200", "--account=lab", "--signal=TERM@300", "--requeue"}
    assert expected <= set(asked)
    assert "--output=/runs/a/slurm-%j.log" in asked


def test_what_the_settings_leave_out_is_left_to_the_cluster() -> None:
    names = {option.partition("=")[0] for option in options(make(Path("/runs/a")))}
    assert not {"--partition", "--account", "--qos", "--cpus-per-task"} & names


def test_further_options_are_passed_on_as_written() -> None:
    text = make(Path("/runs/a"), sbatch=["--constraint=h200", "--nice=100"])
    assert options(text)[-2:] == ["--constraint=h200", "--nice=100"]


def test_cores_are_asked_for_twice_as_srun_does_not_inherit_them() -> None:
    text = make(Path("/runs/a"), cpus_per_node=96)
    assert "--cpus-per-task=96" in options(text)
    assert "srun --ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=1 " in text


@pytest.mark.parametrize("path", ["/runs/a", f"/data/{ODD}/a", "/runs/%j/ü"])
def test_bash_reads_any_path(path: str) -> None:
    text = make(Path(path), env_file=f"/etc/{ODD}", setup=["module load cuda"])
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assignment = next(line for line in text.splitlines() if line.startswith("export RUN_DIR="))
    assert shlex.split(assignment)[1] == f"RUN_DIR={path}"


def test_percent_signs_of_a_path_are_no_patterns_of_slurm() -> None:
    output = next(o for o in options(make(Path("/runs/50%j"))) if o.startswith("--output"))
    assert output == "--output=/runs/50%%j/slurm-%j.log"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("90:30", 5430), ("24:00:00", 86400), ("2-12", 216000), ("1-00:30", 88200)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, expected: int) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time": "a day"}, "time is 'a day'; SLURM takes minutes"),
        ({"time": "00:05:00"}, "at least twice the grace"),
        ({"grace_seconds": 0}, "grace_seconds is 0"),
        ({"port": 80}, "port is 80; it must be between 1024 and 65535"),
        ({"cpus_per_node": 0}, "cpus_per_node is 0"),
        ({"sbatch": ["constraint=h200"]}, "sbatch has 'constraint=h200'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlurmSettings(**settings)


def test_counts_below_one_and_line_breaks_are_refused() -> None:
    with pytest.raises(RecipeError, match="NODES: 0; it must be at least 1"):
        make(Path("/runs/a"), nodes=0)
    with pytest.raises(RecipeError, match="NGPU: -1; it must be at least 1"):
        make(Path("/runs/a"), gpus=-1)
    with pytest.raises(RecipeError, match="output_dir: .* holds a line break"):
        make(Path("/runs/a\nrm -rf /"))


@pytest.mark.parametrize("key", ["python", "mem", "partition", "account", "qos", "env_file"])
def test_a_line_break_is_the_problem_of_its_key(key: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        make(Path("/runs/a"), **{key: "a\nb"})
    (problem,) = refusal.value.problems
    assert problem.path == f"launch.slurm.{key}"


SRUN = """#!/bin/bash
# Two nodes, each a session of its own like a step's container.
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node setsid "$@" & echo $! >>"$FAKE/nodes"; done
code=0; for pid in $(cat "$FAKE/nodes"); do wait "$pid" || code=$?; done; exit "$code"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo first; echo second; else echo "$@" >>"$FAKE/requeued"; fi
"""
AGENT = """#!/bin/bash
printf '%s\\n' "$@" >"$FAKE/argv.$SLURM_NODEID"
[ ! -e "$FAKE/crash" ] || exit 7
touch "$FAKE/ready.$SLURM_NODEID"
while [ ! -e "$FAKE/finish" ]; do sleep 0.05; done
[ "$SLURM_NODEID" != 0 ] || echo '{"state": "done"}' >"$RUN_DIR/status.json"
"""


class Cluster:
    def __init__(self, root: Path) -> None:
        self.fake, self.run_dir, tools = root / "fake", root / ODD, root / "bin"
        for folder in (self.fake, self.run_dir, tools):
            folder.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("agent", AGENT)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.env = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "FAKE": str(self.fake),
            "SLURM_JOB_ID": "1234",
            "SLURM_JOB_NODELIST": "node[1-2]",
        }
        self.script = script(
            self.run_dir,
            SlurmSettings(),
            nodes=2,
            gpus_per_node=2,
            job_name="j",
            python=str(tools / "agent"),
            root=root,
        )

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", self.script], env=self.env, text=True, stdout=subprocess.PIPE
        )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 20
        while len(list(self.fake.glob("ready.*"))) < 2:
            assert time.monotonic() < deadline, "the nodes did not start"
            time.sleep(0.02)

    def requeued(self) -> str:
        file = self.fake / "requeued"
        return file.read_text().strip() if file.exists() else ""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_every_node_starts_the_agent_for_the_same_rendezvous(cluster: Cluster) -> None:
    (cluster.fake / "finish").touch()
    assert cluster.start().wait(timeout=30) == 0
    first, second = ((cluster.fake / f"argv.{n}").read_text().splitlines() for n in (0, 1))
    assert first == second
    pairs = dict(zip(first, first[1:], strict=False))
    assert first[:3] == ["-u", "-m", "torch.distributed.run"]
    assert (pairs["--nnodes"], pairs["--nproc-per-node"]) == ("2", "2")
    assert (pairs["--rdzv-endpoint"], pairs["--rdzv-id"]) == ("first:21234", "1234-0")
    assert (pairs["--log-dir"], pairs["--redirects"]) == (f"{cluster.run_dir}/logs", "1:3")
    assert first[-3:] == ["-m", "launch.worker", str(cluster.run_dir)]
    assert cluster.requeued() == ""


def test_the_first_failure_is_the_jobs_and_is_not_tried_again(cluster: Cluster) -> None:
    (cluster.run_dir / "status.json").write_text('{"state": "stopped"}')
    (cluster.fake / "crash").touch()
    assert cluster.start().wait(timeout=30) == 7
    assert cluster.requeued() == ""


def test_a_node_does_not_hear_sigterm_which_slurm_sends_to_its_ranks_too(cluster: Cluster) -> None:
    job = cluster.start()
    cluster.wait_until_ready()
    for pid in (cluster.fake / "nodes").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    time.sleep(0.3)
    assert job.poll() is None
    (cluster.fake / "finish").touch()
    assert job.wait(timeout=30) == 0


@pytest.mark.parametrize("state", ["stopped", "done"])
def test_a_stopped_run_is_queued_again_and_a_finished_one_is_not(
    cluster: Cluster, state: str
) -> None:
    job = cluster.start()
    cluster.wait_until_ready()
    (cluster.run_dir / "status.json").write_text(f'{{"state": "{state}", "signal": 15}}\n')
    for pid in (cluster.fake / "nodes").read_text().split():
        os.killpg(int(pid), signal.SIGKILL)
    job.communicate(timeout=30)
    assert cluster.requeued() == ("requeue 1234" if state == "stopped" else "")


def test_a_step_that_ended_without_a_word_is_a_failure(cluster: Cluster) -> None:
    quiet = Path(cluster.env["PATH"].partition(":")[0]) / "agent"
    quiet.write_text("#!/bin/sh\nexit 0\n")
    assert cluster.start().wait(timeout=30) == 1
