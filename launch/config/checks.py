"""Rules that span several sections of a recipe, checked before anything is allocated.

Each rule yields problems; all rules run, so that a user sees everything at once.
"""

from collections.abc import Callable, Iterator

from torchtitan.distributed import ParallelDims

from components.core.problems import Problem, RecipeError, nearest
from components.core.recipe import Recipe
from components.core.registry import component_types, enabled_components
from components.titan.attention import resolve_attention
from components.titan.tokenizer import vocabulary_size

Rule = Callable[[Recipe, int], Iterator[Problem]]

DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",
)


def check_recipe(recipe: Recipe, world_size: int, device: str) -> None:
    """Run every rule.

    Args:
        recipe: bound.
        world_size: ranks in the job.
        device: "cpu" or "cuda".

    Raises:
        RecipeError: all problems found.
    """
    problems = [problem for rule in RULES for problem in rule(recipe, world_size)]
    problems += _device_rules(recipe, device)
    if problems:
        raise RecipeError(problems)


def _model(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    for key, message in recipe.model.check():
        yield Problem(key, message)


def _data(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    for sentence in recipe.data.check():
        key, _, message = sentence.partition(": ")
        yield Problem(key, message)


def _vocabulary(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    size = vocabulary_size(recipe.data.tokenizer)
    if size is not None and size > recipe.model.vocab_size:
        yield Problem(
            "model.vocab_size",
            f"{recipe.model.vocab_size} is smaller than the {size} tokens of "
            f"data.tokenizer {recipe.data.tokenizer!r}",
            f"use model.vocab_size={-(-size // 64) * 64} or another tokenizer",
        )


def _lengths(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    seq_len, longest = recipe.training.seq_len, recipe.model.max_seq_len
    if seq_len < 1:
        yield Problem("training.seq_len", f"{seq_len} is not a length; it must be at least 1")
    elif seq_len > longest:
        message = f"{seq_len} is longer than model.max_seq_len {longest}"
        yield Problem("training.seq_len", message, f"use at most {longest}, or raise the model's")
    cp, tp = recipe.parallelism.context_parallel_degree, recipe.parallelism.tensor_parallel_degree
    divisor = (tp if recipe.parallelism.enable_sequence_parallel else 1) * (2 * cp if cp > 1 else 1)
    if divisor > 0 and seq_len % divisor:
        down, up = seq_len // divisor * divisor, -(-seq_len // divisor) * divisor
        yield Problem(
            "training.seq_len",
            f"{seq_len} is not a multiple of {divisor} (tensor degree x twice the context degree)",
            f"nearest legal: {down} or {up}",
        )


def _degrees(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    parallel = recipe.parallelism
    wrong = False
    for name in DEGREES:
        value = getattr(parallel, name)
        leftover = name == "data_parallel_shard_degree" and value == -1
        if value < 1 and not leftover:
            wrong = True
            legal = "-1 (all ranks left over) or at least 1" if "shard" in name else "at least 1"
            yield Problem(f"parallelism.{name}", f"{value} is not a degree; it must be {legal}")
    if wrong:
        return
    fixed = 1
    for name in DEGREES[:-1]:
        fixed *= max(getattr(parallel, name), 1)
    ok = world_size % fixed == 0 if parallel.data_parallel_shard_degree == -1 else False
    if not ok and fixed != world_size:
        parts = " x ".join(
            f"{name.removesuffix('_degree')} {getattr(parallel, name)}"
            for name in DEGREES[:-1]
            if getattr(parallel, name) not in (1, -1)
        )
        yield Problem(
            "parallelism",
            f"the degrees multiply to {fixed} ({parts or 'all 1'}), but the job has {world_size} "
            "ranks",
            "change hardware.ranks (or NGPU=), a degree, or use data_parallel_shard_degree=-1",
        )
        return
    yield from _expert_degree(recipe, world_size)


def _expert_degree(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    ep = recipe.parallelism.expert_parallel_degree
    dims = ParallelDims.from_config(recipe.parallelism, world_size)
    sparse = dims.dp_shard * dims.cp * dims.tp
    if sparse % ep:
        legal = ", ".join(str(n) for n in range(1, sparse + 1) if sparse % n == 0)
        yield Problem(
            "parallelism.expert_parallel_degree",
            f"{ep} does not divide the {sparse} ranks of one replica",
            f"legal: {legal}",
        )
    experts = getattr(recipe.model, "n_experts", None)
    if experts and experts % ep:
        legal = ", ".join(str(n) for n in range(1, sparse + 1) if sparse % n == experts % n == 0)
        yield Problem(
            "parallelism.expert_parallel_degree",
            f"{ep} does not divide the model's {experts} experts",
            f"legal: {legal}",
        )


def _batches(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    training = recipe.training
    for name in ("steps", "local_batch_size"):
        if getattr(training, name) < 1:
            message = f"{getattr(training, name)} is too few; it must be at least 1"
            yield Problem(f"training.{name}", message)
    parallel = recipe.parallelism
    rest = (
        parallel.context_parallel_degree
        * parallel.tensor_parallel_degree
        * parallel.pipeline_parallel_degree
    )
    if rest < 1 or world_size % rest or training.local_batch_size < 1:
        return
    step = training.local_batch_size * (world_size // rest)
    if training.global_batch_size > 0 and training.global_batch_size % step:
        down = training.global_batch_size // step * step
        yield Problem(
            "training.global_batch_size",
            f"{training.global_batch_size} is not a multiple of {step} (local_batch_size "
            f"{training.local_batch_size} x {world_size // rest} data-parallel ranks)",
            f"nearest legal: {down or step} or {down + step}; -1 means no accumulation",
        )
    if training.global_batch_size == 0 or training.global_batch_size < -1:
        message = f"{training.global_batch_size} is not a batch size; use -1 or at least 1"
        yield Problem("training.global_batch_size", message)


def _cuda_graphs(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    if not recipe.training.disable_cuda_graphs:
        yield Problem(
            "training.disable_cuda_graphs",
            "false: CUDA graphs cannot capture the host synchronisations of expert dispatch",
            "set it to true",
        )


def _validation(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    if recipe.validation.every < 1:
        message = f"{recipe.validation.every} is too few steps; it must be at least 1"
        yield Problem("validation.every", message)
    if recipe.validation.batches < 1 and recipe.validation.batches != -1:
        message = f"{recipe.validation.batches} is not a number of batches; use -1 or at least 1"
        yield Problem("validation.batches", message)


def _components(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    enabled = enabled_components(recipe.components)
    names = {component.name for component in enabled}
    for component in enabled:
        for needed in component.requires:
            if needed not in names:
                hint = f"set components.{needed}.enabled=true"
                yield Problem(component.path, f"needs components.{needed}, which is off", hint)
        for other in component.excludes:
            if other in names and other in component_types():
                hint = "switch one of them off"
                yield Problem(component.path, f"cannot be on with components.{other}", hint)
        yield from component.check(recipe)


def _device_rules(recipe: Recipe, device: str) -> list[Problem]:
    problems = []
    try:
        resolve_attention(recipe.model.attention, device)
    except ValueError as error:
        problems.append(Problem("", str(error)))
    if device == "cpu" and recipe.training.enable_cpu_offload:
        message = "true needs a GPU to offload from; this run is on the CPU"
        problems.append(Problem("training.enable_cpu_offload", message))
    if device == "cpu" and recipe.optimizer.implementation == "fused_opt_states_bf16":
        message = "'fused_opt_states_bf16' runs on CUDA only"
        close = nearest("fused", ["fused", "foreach", "for-loop"])
        problems.append(Problem("optimizer.implementation", message, f"use {close[0]}"))
    return problems


RULES: tuple[Rule, ...] = (
    _model, _data, _vocabulary, _lengths, _degrees, _batches, _cuda_graphs, _validation, _components,
)  # fmt: skip
