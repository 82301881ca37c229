"""`make train`, `make check` and `make inspect`: from a recipe file to a run on this machine.

Imports that reach torchtitan come after ``use_device``, hence inside the functions.
"""

import contextlib
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launch.ready import Ready
from launch.rundir import RunDir

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from launch.local import Outcome


def train(path: Path, overrides: list[str], ngpu: int | None) -> int:
    """Check a recipe, create (or continue) its run directory and run it here.

    Returns:
        Exit status: 0, 1 when a rank failed, 128 + signal when it was stopped.
    """
    ready = Ready(path, overrides, ngpu)
    from launch import local, record, resume

    recipe = ready.recipe
    if recipe.checkpoint.resume is not None:
        run = resume.find(recipe, ready.composed)
        steps = run.checkpoints(recipe.checkpoint.folder)
        say(f"continuing {run.path} after step {max(steps)}")
        for change in resume.changes(run, recipe):
            say(f"  changed: {change}")
    else:
        run = record.create(recipe, ready.composed, sys.argv)
    with record.only_launch_of(run):
        if recipe.checkpoint.resume is not None:
            record.record(run, recipe, ready.composed, sys.argv)
        say(f"run directory: {run.path}")
        say(f"training on {ready.ranks} {ready.device} rank{'s' if ready.ranks > 1 else ''}")
        outcome = local.start(run, ready.ranks, ready.device)
    say(_ending(run, recipe, outcome))
    return outcome.code


def say(text: str) -> None:
    """Print, or not where the terminal or the reader is gone: the run matters more."""
    with contextlib.suppress(OSError):
        print(text)


def check(path: Path, overrides: list[str], ngpu: int | None) -> str:
    """All validators and the model's size, without training. Returns the report."""
    ready = Ready(path, overrides, ngpu, anywhere=True)
    from launch.summary import summarise

    return summarise(ready.recipe, ready.target)


def inspect(path: Path, overrides: list[str], sample: int) -> str:
    """What the model will read: one sample as text with its document boundaries."""
    ready = Ready(path, overrides, ngpu=None, anywhere=True)
    from components.titan.tokenizer import tokenizer_config
    from data.inspect import describe
    from data.loader import PackedLoader

    config, tokenizer_path = tokenizer_config(ready.recipe.data.tokenizer)
    loader = PackedLoader.Config(corpus=ready.recipe.data, split="train").build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=config.build(tokenizer_path=tokenizer_path),
        seq_len=ready.recipe.training.seq_len,
        local_batch_size=1,
    )
    return describe(loader, sample)


def _ending(run: RunDir, recipe: "Recipe", outcome: "Outcome") -> str:
    """What to look at and what to do next."""
    from launch.config.sources import display

    steps = run.checkpoints(recipe.checkpoint.folder)
    status = run.read_status()
    done = status.get("step", max(steps, default=0))
    lines = [_verdict(outcome, done)]
    export = run.exports(recipe.checkpoint.folder).get(done)
    if steps or export is None:
        lines.append(f"checkpoint   {display(list(steps.values())[-1]) if steps else 'none'}")
    if export is not None:
        lines.append(f"export       {display(export)} (Hugging Face)")
    frozen = shlex.quote(display(run.frozen))
    if done:
        # Not resolved: a virtual environment's interpreter is a link to one without its packages.
        python = Path(sys.executable)
        python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
        logs = shlex.quote(display(run.tensorboard))
        lines.append(f"TensorBoard  {python} -m tensorboard.main --logdir {logs}")
        lines.append(f"replay       make train RECIPE={frozen}")
    if steps and not (outcome.code == 0 and recipe.checkpoint.last_save_model_only):
        again = f"make train RECIPE={frozen} checkpoint.resume={shlex.quote(display(run.path))}"
        more = f" training.steps={recipe.training.steps * 2}" if outcome.code == 0 else ""
        lines.append(f"continue     {again}{more}")
    return "\n" + "\n".join(lines)


def _verdict(outcome: "Outcome", step: int) -> str:
    if outcome.message:
        return outcome.message
    if outcome.code == 0:
        return f"done after {step} steps"
    return f"stopped by {signal.Signals(outcome.code - 128).name} after step {step}"
