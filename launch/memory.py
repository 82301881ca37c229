"""`make memory`: train a few steps and draw the device memory of the last one."""

import sys
from pathlib import Path

from components.core.problems import Problem, RecipeError
from launch.ready import Ready
from launch.train import say


def settings(step: int) -> dict[str, str]:
    """What such a run sets: it ends with the step that is drawn, and writes no checkpoint."""
    return {
        "debug.memory_timeline": str(step),
        "training.steps": str(step),
        "checkpoint.enable": "false",
        "validation.enabled": "false",
    }


def memory(path: Path, overrides: list[str], ngpu: int | None, step: int) -> int:
    """Train ``step`` steps here, print the first rank's memory, say where the pictures are.

    Returns:
        Exit status as of `make train`.

    Raises:
        RecipeError: the recipe is wrong, or an override sets what this command sets.
    """
    own = settings(step)
    refuse(step, overrides, own)
    ready = Ready(path, [*overrides, *(f"{key}={value}" for key, value in own.items())], ngpu)
    from components.titan.memory.recorder import NAME, SNAPSHOT
    from launch import local, record
    from launch.config.sources import display

    run = record.create(ready.recipe, ready.composed, sys.argv)
    with record.only_launch_of(run):
        say(f"run directory: {run.path}")
        ranks = "1 rank" if ready.ranks == 1 else f"the first of {ready.ranks} ranks"
        say(f"recording step {step} on {ready.device}, {ranks}")
        outcome = local.start(run, ready.ranks, ready.device)
    if outcome.message:
        say(f"\n{outcome.message}")
    words = run.path / f"{NAME}.txt"
    if words.is_file():
        say(f"\n{words.read_text()}")
        say(f"picture      {display(run.path / f'{NAME}.png')}")
        say(f"with figures {display(run.path / f'{NAME}.html')}")
        if (run.path / SNAPSHOT).is_file():
            say(f"snapshot     {display(run.path / SNAPSHOT)} (for torch's memory_viz)")
    return outcome.code


def refuse(step: int, overrides: list[str], own: dict[str, str]) -> None:
    """Refuse a step that cannot be, and overrides of what ``make memory`` sets itself.

    Raises:
        RecipeError: with every such problem.
    """
    problems = []
    if step < 1:
        problems.append(Problem("STEP", f"{step} is no step; steps count from 1"))
    keys = [text.partition("=")[0].lstrip("+") for text in overrides]
    for key in keys:
        if key in own:
            message = f"`make memory` sets it to {own[key]} itself"
            problems.append(Problem(key, message, "leave it out; STEP=3 draws another step"))
    if problems:
        raise RecipeError(problems)
