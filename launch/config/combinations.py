"""Settings that are each fine and do not work together."""

from collections.abc import Iterator

from components.core.problems import Problem, shown
from components.core.recipe import Recipe
from components.models.moe import MoEModel
from components.models.titan_attention import TitanAttentionSettings


def check_combinations(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    """Problems of pairs of settings, each with the way out."""
    yield from _seed_checkpoint(recipe, world_size)
    yield from _context_parallel(recipe)
    yield from _pipeline(recipe)
    yield from _checkpoints(recipe)
    yield from _debug(recipe)
    yield from _routing_profile(recipe)


def _seed_checkpoint(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    if recipe.checkpoint.create_seed_checkpoint and world_size != 1:
        message = f"true needs one process, so that nothing is sharded; this job has {world_size}"
        yield Problem("checkpoint.create_seed_checkpoint", message, "add NGPU=1")


def _context_parallel(recipe: Recipe) -> Iterator[Problem]:
    degree, model = recipe.parallelism.context_parallel_degree, recipe.model
    varlen = isinstance(model, TitanAttentionSettings) and model.attention == "varlen"
    if degree > 1 and varlen:
        message = f"'varlen' cannot run with parallelism.context_parallel_degree {degree}"
        yield Problem("model.attention", message, "use 'auto', 'flex' or 'sdpa'")


def _pipeline(recipe: Recipe) -> Iterator[Problem]:
    """Training is right under torchtitan's pipelining; what the first rank reports is not."""
    degree = recipe.parallelism.pipeline_parallel_degree
    if degree > 1:
        yield Problem(
            "parallelism.pipeline_parallel_degree",
            f"{degree}: the loss is known to the last stage alone, and this project reports the "
            "first rank's",
            "use 1; shard with data_parallel_shard_degree, context_ or expert_parallel_degree",
        )


def _checkpoints(recipe: Recipe) -> Iterator[Problem]:
    settings = recipe.checkpoint
    if settings.resume is not None and (not settings.enable or settings.load_only):
        key = "enable" if not settings.enable else "load_only"
        value = "false" if not settings.enable else "true"
        message = f"{value} with checkpoint.resume: a continued run must load and save"
        yield Problem(f"checkpoint.{key}", message, "leave it out, or start a new run")
    if settings.resume is None and settings.load_step != -1:
        message = f"{settings.load_step} has no effect on a new run, which has nothing to load"
        yield Problem("checkpoint.load_step", message, "add checkpoint.resume, or leave it out")


def _debug(recipe: Recipe) -> Iterator[Problem]:
    """Both look into the model's modules while they run."""
    debug, step = recipe.debug, recipe.debug.memory_timeline
    wanted = {
        "debug.leak_guard": "true" if debug.leak_guard else "",
        "debug.memory_timeline": "" if step is None else str(step),
    }
    for key, value in wanted.items():
        if value and recipe.compile.enable:
            message = f"{value} sees nothing of compiled layers (compile.enable is true)"
            yield Problem(key, message, "use compile.enable=false for this run")
        if value and not recipe.training.disable_cuda_graphs:
            message = f"{value} sees nothing of a replayed CUDA graph"
            yield Problem(key, message, "use training.disable_cuda_graphs=true for this run")
    if step is not None and step > recipe.training.steps:
        message = f"{step} is never reached: training.steps is {recipe.training.steps}"
        yield Problem("debug.memory_timeline", message, "use a smaller step, or null")
    if step is not None and recipe.profiler.enable_memory_snapshot:
        message = f"{step} and profiler.enable_memory_snapshot=true both record the allocator"
        yield Problem("debug.memory_timeline", message, "use one of them")


def _routing_profile(recipe: Recipe) -> Iterator[Problem]:
    profile, model, path = recipe.debug.profile, recipe.model, "debug.routing_profile"
    if profile is None or model.check():
        return
    value = shown(recipe.debug.routing_profile)
    if recipe.debug.moe_force_load_balance:
        message = f"{value} and debug.moe_force_load_balance=true both choose the experts"
        yield Problem(path, message, "use one of them")
    if model.n_experts is None:
        message = f"{value} finds no router: the model has no experts"
        yield Problem(path, message, "use null, or a model with experts")
        return
    if recipe.parallelism.spmd_backend == "full_dtensor":
        message = (
            f"{value} chooses experts on plain tensors, and parallelism.spmd_backend "
            "'full_dtensor' has router scores of another kind"
        )
        yield Problem(path, message, "use parallelism.spmd_backend=spmd_types, or null")
    problem = profile.problem(model.n_experts)
    if problem:
        most = model.n_experts - (profile.percent < 100)
        fewer = f"'{profile.percent}/{most}' or fewer hot experts, or " if most else ""
        yield Problem(path, f"{value}: {problem}", f"use {fewer}'balanced'")
    elif (
        isinstance(model, MoEModel)
        and model.comm_backend != "standard"
        and profile.repeats(model.top_k, model.n_experts)
    ):
        message = (
            f"{value} sends a token to an expert more than once (model.top_k {model.top_k}), which "
            f"model.comm_backend {model.comm_backend!r} does not count"
        )
        yield Problem(path, message, "use model.comm_backend=standard, or more hot experts")
