"""What every machine of a cluster job runs: torchrun's agent around ``launch.worker``."""

import re
import shlex
from pathlib import Path


def agent_command(
    python: str,
    run_dir: str,
    *,
    nodes: int,
    ranks_per_node: int,
    endpoint: str,
    job: str,
    extra: str,
) -> str:
    """One shell command, over several lines.

    Args:
        python: interpreter, as a shell word.
        run_dir: run directory with the frozen recipe, as a shell word.
        nodes: machines.
        ranks_per_node: processes on each.
        endpoint: HOST:PORT of the rendezvous, as a shell word.
        job: what tells this job's rendezvous from any other, as a shell word.
        extra: further options of torchrun.
    """
    words = [
        f"{python} -u -m torch.distributed.run",
        f"--nnodes {nodes} --nproc-per-node {ranks_per_node}",
        f"--rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id {job}",
        f"--max-restarts 0 {extra}",
        f"--log-dir {run_dir}/logs",
    ]
    # The first rank of a machine writes to the job's log, what others print goes to files.
    others = ",".join(f"{rank}:3" for rank in range(1, ranks_per_node))
    words += [f"--redirects {others}"] if others else []
    return " \\\n    ".join([*words, f"-m launch.worker {run_dir}"])


def require_positive(**numbers: int) -> None:
    """Raise a ValueError that names the first number below one."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")


def job_name(run_dir: Path) -> str:
    """``<recipe>-<run>``, in characters that schedulers accept."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", f"{run_dir.parent.name}-{run_dir.name}").strip("-")


def word(text: str | Path) -> str:
    """``text`` as one shell word.

    Raises:
        ValueError: it holds a line break, which no job script can carry.
    """
    if "\n" in str(text):
        raise ValueError(f"{str(text)!r} holds a line break; job scripts cannot carry one")
    return shlex.quote(str(text))
