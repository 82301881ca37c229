"""Continue a run: find it, and refuse when the recipe is no longer the same one."""

from pathlib import Path
from typing import Any

from components.core.problems import Problem, RecipeError
from components.core.recipe import Recipe
from components.core.registry import component_types
from launch.config import freeze
from launch.config.compose import Composed
from launch.config.sources import display, read
from launch.record import run_name
from launch.rundir import RunDir

# Keys that may change between two launches of one run: they do not change what is learnt, or
# changing them is what people continue a run for. Everything else must be equal.
MAY_CHANGE = (
    "description",
    "hardware",
    "model.attention",
    "model.flex_autotune",
    "model.kda_kernel",
    "model.sparse_mla_kernel",
    "model.sparse_mla_chunk",
    "model.indexer_kernel",
    "model.hyper_connections_kernel",
    "data.cache_dir",
    "training.steps",
    "training.gc_freq",
    "training.gc_debug",
    "training.local_batch_size",
    "parallelism",
    "checkpoint",
    "validation",
    "metrics",
    "compile",
    "comm",
    "profiler",
    "debug",
    "launch",
    "output_dir",
)
MUST_STAY = ("debug.seed",)


def find(recipe: Recipe, composed: Composed) -> RunDir:
    """The run that ``checkpoint.resume`` asks for.

    Raises:
        RecipeError: no such run, no complete checkpoint, or another recipe; differences are listed.
    """
    wanted = recipe.checkpoint.resume
    assert wanted is not None
    run = _latest(recipe, composed) if wanted == "latest" else _named(wanted, recipe)
    saved = read_frozen(run)
    differences = compare(saved, freeze.to_plain(recipe))
    if differences:
        raise RecipeError([_refusal(run, differences, recipe.checkpoint.folder)])
    steps = run.checkpoints(recipe.checkpoint.folder)
    chosen = recipe.checkpoint.load_step
    if chosen != -1 and chosen != max(steps):
        raise RecipeError([_mixed_history(run, chosen, steps)])
    if max(steps) >= recipe.training.steps:
        message = f"{recipe.training.steps} steps are already done (checkpoint of {max(steps)})"
        hint = f"to train on: training.steps={max(steps) * 2}"
        raise RecipeError([Problem("training.steps", message, hint)])
    return run


def _latest(recipe: Recipe, composed: Composed) -> RunDir:
    parent = Path(recipe.output_dir).resolve() / run_name(composed.path)
    runs = [RunDir(path) for path in sorted(parent.glob("*")) if path.is_dir()]
    complete = [run for run in runs if run.checkpoints(recipe.checkpoint.folder)]
    if not complete:
        found = f"{len(runs)} runs, none with a complete checkpoint" if runs else "no run"
        message = f"'latest' found {found} in {display(parent)}"
        hint = "start one without checkpoint.resume, or give the path of a run directory"
        raise RecipeError([Problem("checkpoint.resume", message, hint)])
    return max(complete, key=lambda run: _age(run, recipe.checkpoint.folder))


def _age(run: RunDir, folder: str) -> float:
    newest = list(run.checkpoints(folder).values())[-1]
    return (newest / ".metadata").stat().st_mtime


def _named(wanted: str, recipe: Recipe) -> RunDir:
    run = RunDir(Path(wanted).expanduser().resolve())
    if not run.frozen.is_file():
        message = f"{wanted!r} is not a run directory (it holds no recipe.yaml)"
        hint = 'use "latest" or a path like outputs/<recipe>/<time>-<hash>'
        raise RecipeError([Problem("checkpoint.resume", message, hint)])
    if not run.checkpoints(recipe.checkpoint.folder):
        message = f"{wanted!r} holds no complete checkpoint"
        raise RecipeError([Problem("checkpoint.resume", message)])
    return run


def read_frozen(run: RunDir) -> dict[str, Any]:
    """Dotted key -> value of every leaf of a run's frozen recipe."""
    return {key: value for key, (value, _) in read(run.frozen).keys.items()}


def changes(run: RunDir, recipe: Recipe) -> list[str]:
    """What differs from the run so far and may: "key: before -> now" of every such key."""
    now = _flatten(freeze.to_plain(recipe))
    return [
        f"{key}: {before!r} -> {now[key]!r}"
        for key, before in read_frozen(run).items()
        if key in now and now[key] != before and not key.startswith("checkpoint.")
    ]


def compare(saved: dict[str, Any], present: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys that must be equal for a run to continue and are not: (key, saved, present)."""
    now = _flatten(present)
    before = {key: value for key, value in saved.items() if not isinstance(value, dict)}
    return [
        (key, before.get(key), now.get(key))
        for key in dict.fromkeys([*before, *now])
        if not (_may_change(key) or _off(key, before, now)) and before.get(key) != now.get(key)
    ]


def _off(key: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether the key is of a technique that is off, and was off or not there yet."""
    section, name, _ = f"{key}..".split(".", 2)
    switch = f"{section}.{name}.enabled"
    return section == "components" and not (before.get(switch) or now.get(switch))


def _may_change(key: str) -> bool:
    if key in MUST_STAY:
        return False
    section, _, rest = key.partition(".")
    if section == "components":
        # Techniques that do not change what is learnt may be switched between two launches.
        name, _, setting = rest.partition(".")
        technique = component_types().get(name)
        if technique is None or not technique.changes_training:
            return True
        return setting in technique.watches
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def _flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        flat.update(_flatten(value, path) if isinstance(value, dict) else {path: value})
    return flat


def _refusal(run: RunDir, differences: list[tuple[str, Any, Any]], folder: str) -> Problem:
    lines = [f"{key}: {before!r} in the run, {now!r} now" for key, before, now in differences[:12]]
    if len(differences) > 12:
        lines.append(f"... and {len(differences) - 12} more")
    newest = list(run.checkpoints(folder).values())
    lines.append(
        "to start a new run from its weights instead: "
        f"checkpoint.initial_load_path={newest[-1]} checkpoint.initial_load_model_only=true"
    )
    message = f"{display(run.path)} was another run"
    return Problem("checkpoint.resume", message, "\n".join(lines))


def _mixed_history(run: RunDir, chosen: int, steps: dict[int, Path]) -> Problem:
    if chosen not in steps:
        known = ", ".join(map(str, steps))
        return Problem("checkpoint.load_step", f"{chosen} is not a checkpoint; there are {known}")
    newer = ", ".join(str(step) for step in steps if step > chosen)
    message = f"{chosen} is older than checkpoints {newer} of {display(run.path)}"
    hint = "move the newer ones out of the folder first; a run must not mix two histories"
    return Problem("checkpoint.load_step", message, hint)
