"""What every machine of a cluster job runs: torchrun's agent around ``launch.worker``."""

import shlex
from pathlib import Path

from components.core.problems import Problem, RecipeError, shown


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
    """Raise a ValueError that names the first number below one, for settings classes."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")


def require_machines(nodes: int | None, gpus_per_node: int | None) -> None:
    """Refuse numbers of machines and devices below one; None is no number.

    Raises:
        RecipeError: with the name that the command line has for it.
    """
    given = {"NODES": nodes, "NGPU": gpus_per_node}
    problems = [
        Problem(name, f"{number}; it must be at least 1")
        for name, number in given.items()
        if number is not None and number < 1
    ]
    if problems:
        raise RecipeError(problems)


def word(text: str | Path, key: str) -> str:
    """``text`` as one shell word.

    Args:
        key: dotted key that it comes from.

    Raises:
        RecipeError: it holds a line break, which no job script can carry.
    """
    if "\n" in str(text):
        message = f"{shown(str(text))} holds a line break, which no job script can carry"
        raise RecipeError([Problem(key, message, "write it in one line")])
    return shlex.quote(str(text))
