"""`make launch`: the same frozen recipe on a cluster, through SLURM or SkyPilot."""

import shutil
import subprocess
import sys
from pathlib import Path

from components.core.problems import Problem, RecipeError, did_you_mean
from launch.config.groups import ROOT
from launch.ready import Ready
from launch.torchrun import require_machines

SUBMIT = {"slurm": ("sbatch",), "skypilot": ("sky", "jobs", "launch")}


def launch(
    path: Path, overrides: list[str], on: str, nodes: int | None, ngpu: int | None, dry: bool
) -> int:
    """Check a recipe for the machines asked for, write its run directory and submit the job.

    Args:
        on: "slurm" or "skypilot".
        nodes: machines; None takes the recipe's ranks over its ranks per node.
        ngpu: devices per machine; None takes the recipe's.
        dry: print the job instead; nothing is written.

    Raises:
        RecipeError: the recipe is wrong, its ranks do not fill the machines, or the job cannot be
            written.
    """
    require_machines(nodes, ngpu)
    if on not in SUBMIT:
        hint = did_you_mean(on, SUBMIT)
        raise RecipeError([Problem("ON", f"{on!r} is not one of: {', '.join(SUBMIT)}", hint)])
    ready = Ready(path, overrides, ngpu=None, anywhere=True)
    from launch import record, resume

    recipe = ready.recipe
    gpus = min(recipe.hardware.ranks_per_node, ready.ranks) if ngpu is None else ngpu
    machines = -(-ready.ranks // gpus) if nodes is None else nodes
    if machines * gpus != ready.ranks:
        raise RecipeError([_not_filled(machines, gpus, ready.ranks)])
    # Also without `dry`: what is wrong with the job must show before a run directory exists.
    job = _job(on, ready, record.new_path(recipe, ready.composed), machines, gpus)
    if dry:
        print(job)
        return 0
    if recipe.checkpoint.resume is not None:
        run = resume.find(recipe, ready.composed)
        record.record(run, recipe, ready.composed, sys.argv)
    else:
        run = record.create(recipe, ready.composed, sys.argv)
    file = run.path / ("job.sbatch" if on == "slurm" else "task.yaml")
    file.write_text(_job(on, ready, run.path, machines, gpus))
    print(f"run directory: {run.path}")
    return _submit(on, file)


def _job(on: str, ready: Ready, run_dir: Path, nodes: int, gpus: int) -> str:
    from launch import skypilot, slurm

    settings = ready.recipe.launch
    name = ready.composed.path.stem
    if on == "slurm":
        return slurm.script(
            run_dir,
            settings.slurm,
            nodes=nodes,
            gpus_per_node=gpus,
            job_name=name,
            python=sys.executable,
            root=ROOT,
        )
    return skypilot.task(
        run_dir, settings.skypilot, nodes=nodes, gpus_per_node=gpus, job_name=name, root=ROOT
    )


def _submit(on: str, file: Path) -> int:
    command = SUBMIT[on]
    if shutil.which(command[0]) is None:
        print(f"{command[0]} is not on this machine; submit it where it is:", file=sys.stderr)
        print(f"  {' '.join(command)} {file}", file=sys.stderr)
        return 1
    return subprocess.run([*command, str(file)], check=False).returncode


def _not_filled(nodes: int, gpus: int, ranks: int) -> Problem:
    message = f"{nodes} nodes of {gpus} devices are {nodes * gpus} ranks; the recipe wants {ranks}"
    legal = [f"NODES={ranks // n} NGPU={n}" for n in (8, 4, 2, 1) if ranks % n == 0]
    hint = f"legal: {', '.join(legal)}; or change hardware.ranks and the degrees"
    return Problem("hardware.ranks", message, hint)
