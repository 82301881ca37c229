"""SkyPilot: one task per run, starting the frozen recipe on rented machines."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from components.core.problems import Problem, RecipeError
from launch.torchrun import agent_command, require_machines, require_positive, word

_FROZEN = "~/frozen-run"
_STORAGE = "~/outputs"


@dataclass(kw_only=True, slots=True)
class SkyPilotSettings:
    """How `make launch ON=skypilot` asks for machines. What is null is left to SkyPilot."""

    accelerator: str = "H200"
    """Kind of device, by SkyPilot's name; their number comes from `hardware`."""

    infra: str | None = None
    """Where to look, such as `aws/us-east-1` or `k8s`; null: anywhere, the cheapest."""

    use_spot: bool = False
    """Take machines that may be preempted. `sky jobs launch` then moves the run elsewhere, where it
    goes on from the last checkpoint in `storage`."""

    memory: str | None = None
    """Host memory per machine in GiB, `1800+` for at least; offloading wants much."""

    disk_size: int = 512
    """Disk per machine, GiB."""

    image: str | None = None
    """Machine or container image."""

    storage: str | None = None
    """Bucket (`s3://...`, `gs://...`) that holds the run directory. Needed for several machines,
    and to keep anything when machines go away. null: the machine's own disk."""

    port: int = 29500
    """TCP port of the rendezvous on the first machine."""

    python: str | None = None
    """Interpreter on the machines; null: `make setup` installs the locked packages into .venv."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job, such as NCCL settings."""

    setup: list[str] = field(default_factory=list)
    """Shell lines that prepare a machine, before `make setup`."""

    def __post_init__(self) -> None:
        require_positive(disk_size=self.disk_size)
        if not 1024 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be between 1024 and 65535")
        if self.storage is not None and "://" not in self.storage:
            raise ValueError(f"storage is {self.storage!r}; it must be a bucket such as s3://name")
        if self.use_spot and self.storage is None:
            raise ValueError(
                "use_spot is true and storage null; a preempted run would lose its state"
            )


class _Text(str):
    """A string that YAML shows as a block of lines."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def task(
    run_dir: Path,
    settings: SkyPilotSettings,
    *,
    nodes: int,
    gpus_per_node: int,
    job_name: str,
    root: Path,
) -> str:
    """The task as YAML; give it to ``sky launch`` or ``sky jobs launch``.

    Args:
        run_dir: local run directory with the frozen recipe; its files travel with the task.
        settings: the recipe's ``launch.skypilot`` section.
        nodes: machines.
        gpus_per_node: devices, and so ranks, on each.
        job_name: name of the task.
        root: the project's root on this machine; it travels with the task.

    Raises:
        RecipeError: a number below one, a value with a line break, several machines but no storage.
    """
    require_machines(nodes, gpus_per_node)
    if nodes > 1 and settings.storage is None:
        message = f"null, but the {nodes} machines of this run share its directory"
        hint = "name a bucket such as s3://my-bucket/runs"
        raise RecipeError([Problem("launch.skypilot.storage", message, hint)])
    mounts: dict[str, Any] = {_FROZEN: str(run_dir)}
    if settings.storage is not None:
        mounts[_STORAGE] = {"source": settings.storage, "mode": "MOUNT"}
    document = {
        "name": job_name,
        "num_nodes": nodes,
        "resources": _resources(settings, gpus_per_node),
        "workdir": str(root),
        "file_mounts": mounts,
        "envs": dict(settings.env),
        "setup": _Text(_lines(settings.setup + ([] if settings.python else ["make setup"]))),
        "run": _Text(_run(run_dir, settings, nodes, gpus_per_node)),
    }
    kept = {key: value for key, value in document.items() if value not in ({}, "")}
    return yaml.dump(kept, Dumper=_Dumper, sort_keys=False, width=100)


def _resources(settings: SkyPilotSettings, gpus_per_node: int) -> dict[str, Any]:
    wanted = {
        "infra": settings.infra,
        "accelerators": f"{settings.accelerator}:{gpus_per_node}",
        "memory": settings.memory,
        "disk_size": settings.disk_size,
        "image_id": settings.image,
        "use_spot": settings.use_spot,
    }
    return {key: value for key, value in wanted.items() if value is not None}


def _run(run_dir: Path, settings: SkyPilotSettings, nodes: int, gpus_per_node: int) -> str:
    agent = agent_command(
        '"$PYTHON"',
        '"$RUN_DIR"',
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        endpoint=f'"$HEAD:{settings.port}"',
        job='"$SKYPILOT_TASK_ID"',
        # A SIGTERM to the agent reaches the ranks, and they get the time to save.
        extra="--shutdown-timeout 600",
    )
    kept = [word(name, "output_dir") for name in (run_dir.parent.name, run_dir.name)]
    remote = f'"$HOME"{_STORAGE[1:]}/{"/".join(kept)}'
    return _lines(
        [
            f"PYTHON={word(settings.python or '.venv/bin/python', 'launch.skypilot.python')}",
            f"RUN_DIR={remote}",
            'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            "# A machine that replaces another finds the run and goes on from its checkpoint.",
            f'mkdir -p "$RUN_DIR" && cp -R -n {_FROZEN}/. "$RUN_DIR/" || exit',
            f"exec {agent}",
        ]
    )


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
