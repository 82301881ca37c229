"""SLURM: one batch script per run, starting the frozen recipe on every node."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from launch.torchrun import agent_command, require_machines, require_positive, word

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<dhours>\d+)(?::(?P<dminutes>\d+)(?::(?P<dseconds>\d+))?)?"
    r"|(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)|(?P<only>\d+))"
)


@dataclass(kw_only=True, slots=True)
class SlurmSettings:
    """How `make launch ON=slurm` asks for machines. What is null is left to the cluster."""

    partition: str | None = None
    """Partition (queue) to submit to."""

    account: str | None = None
    """Account that is charged."""

    qos: str | None = None
    """Quality of service."""

    time: str = "24:00:00"
    """Wall-clock limit, as SLURM writes it: HH:MM:SS, D-HH:MM:SS or minutes. A run that reaches it
    saves, and goes on in a new allocation if `requeue` is true."""

    grace_seconds: int = 300
    """Seconds before the limit at which the ranks are told to save and stop; more than it takes to
    write a checkpoint."""

    requeue: bool = True
    """Queue the job again after it was stopped by its time limit, by preemption or by SIGTERM."""

    exclusive: bool = True
    """Take whole nodes."""

    mem: str = "0"
    """Host memory per node, as SLURM writes it (512G); 0: all of it, which offloading wants."""

    cpus_per_node: int | None = None
    """Cores per node for the job; null: what the cluster gives."""

    port: int | None = None
    """TCP port of the rendezvous on the first node; null: one derived from the job id."""

    python: str | None = None
    """Interpreter on the nodes; null: the one that runs `make launch`."""

    env_file: str | None = None
    """File of KEY=VALUE lines that every node reads, such as NCCL settings; it must lie where the
    nodes see it."""

    setup: list[str] = field(default_factory=list)
    """Shell lines that every node runs first, such as `module load cuda`."""

    sbatch: list[str] = field(default_factory=list)
    """Further #SBATCH options, such as `--constraint=h200`."""

    def __post_init__(self) -> None:
        require_positive(grace_seconds=self.grace_seconds)
        if self.cpus_per_node is not None:
            require_positive(cpus_per_node=self.cpus_per_node)
        if self.port is not None and not 1024 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be between 1024 and 65535")
        # Shorter, the job would be told to stop as it starts, and queue itself again for ever.
        if seconds(self.time) < 2 * self.grace_seconds:
            raise ValueError(
                f"time is {self.time!r} and grace_seconds {self.grace_seconds}; "
                "the limit must be at least twice the grace"
            )
        for option in self.sbatch:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"sbatch has {option!r}; each is one option such as --nice=100")


def seconds(time: str) -> int:
    """A SLURM time limit in seconds.

    Raises:
        ValueError: not one of SLURM's spellings.
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError(
            f"time is {time!r}; SLURM takes minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
        )
    part = {name: int(number or 0) for name, number in match.groupdict().items()}
    hours = part["days"] * 24 + part["dhours"] + part["hours"]
    minutes = hours * 60 + part["dminutes"] + part["minutes"] + part["only"]
    return minutes * 60 + part["dseconds"] + part["seconds"]


def script(
    run_dir: Path,
    settings: SlurmSettings,
    *,
    nodes: int,
    gpus_per_node: int,
    job_name: str,
    python: str,
    root: Path,
) -> str:
    """The batch script; give it to ``sbatch``.

    Args:
        run_dir: run directory with the frozen recipe, on a file system that all nodes share.
        settings: the recipe's ``launch.slurm`` section.
        nodes: machines.
        gpus_per_node: devices, and so ranks, on each.
        job_name: name in the queue.
        python: interpreter to use unless the settings name one.
        root: the project's root as the nodes see it.

    Raises:
        RecipeError: a number below one, or a value with a line break.
    """
    require_machines(nodes, gpus_per_node)
    header = _header(run_dir, settings, nodes, gpus_per_node, job_name)
    agent = agent_command(
        '"$PYTHON"',
        '"$RUN_DIR"',
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        endpoint='"$HEAD:$PORT"',
        job='"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        extra="--signals-to-handle SIGINT --shutdown-timeout 60",
    )
    cpus = f" --cpus-per-task={settings.cpus_per_node}" if settings.cpus_per_node else ""
    return _BODY.format(
        header="\n".join(f"#SBATCH {option}" for option in header),
        root=word(root, ""),
        run_dir=word(run_dir, "output_dir"),
        python=word(settings.python or python, "launch.slurm.python"),
        port=settings.port or "$((20000 + SLURM_JOB_ID % 20000))",
        setup="".join(f"    {line}\n" for line in _setup(settings)),
        agent=agent.replace("\n", "\n    "),
        cpus=cpus,
        requeue=_REQUEUE if settings.requeue else "",
    )


def _header(
    run_dir: Path, settings: SlurmSettings, nodes: int, gpus_per_node: int, job_name: str
) -> list[str]:
    log = str(run_dir).replace("%", "%%") + "/slurm-%j.log"
    options = [
        f"--job-name={word(job_name, 'RECIPE')}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={gpus_per_node}",
        f"--mem={word(settings.mem, 'launch.slurm.mem')}",
        f"--time={settings.time}",
        f"--signal=TERM@{settings.grace_seconds}",
        "--requeue" if settings.requeue else "--no-requeue",
        "--open-mode=append",
        f"--output={word(log, 'output_dir')}",
    ]
    optional = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
    }
    options += [
        f"--{name}={word(value, f'launch.slurm.{name}')}"
        for name, value in optional.items()
        if value
    ]
    cores = settings.cpus_per_node
    options += [f"--cpus-per-task={cores}"] if cores else []
    options += ["--exclusive"] if settings.exclusive else []
    return options + settings.sbatch


def _setup(settings: SlurmSettings) -> list[str]:
    if not settings.env_file:
        return settings.setup
    file = word(settings.env_file, "launch.slurm.env_file")
    return [f"set -a; . {file} || exit; set +a", *settings.setup]


_BODY = """\
#!/bin/bash
{header}

# Starts the frozen recipe of RUN_DIR on every node; submitted again, it goes on from the last
# checkpoint. To save and stop for good:
#   scontrol update JobId=ID Requeue=0; scancel --signal=TERM ID
export RUN_DIR={run_dir}
export PYTHON={python}
export PORT={port}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
cd {root} || exit

node() {{
{setup}    # SLURM sends SIGTERM to every process of the step. The ranks save and leave on it; the
    # agent must not hear it, as it would send it to them a second time.
    trap '' TERM
    exec {agent}
}}
export -f node

rm -f "$RUN_DIR/status.json"
srun --ntasks-per-node=1{cpus} --kill-on-bad-exit=1 bash -c node
code=$?
{requeue}# Stopped ranks that could not save leave no status: that is a failure.
[ -e "$RUN_DIR/status.json" ] || [ "$code" -ne 0 ] || code=1
exit "$code"
"""

_REQUEUE = """\
if grep -q '"state": "stopped"' "$RUN_DIR/status.json" 2>/dev/null; then
    echo "stopped with its state saved: queueing job $SLURM_JOB_ID again"
    scontrol requeue "$SLURM_JOB_ID"
fi
"""
