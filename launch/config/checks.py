"""Rules that span several sections of a recipe, checked before anything is allocated.

Each rule yields problems; all rules run, so that a user sees everything at once.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims

from components.core.base import Target
from components.core.problems import (
    Problem,
    RecipeError,
    listed_divisors,
    nearest_multiples,
    shown,
)
from components.core.recipe import Recipe
from components.core.registry import enabled_components
from components.core.sizes import compute_itemsize
from components.offload.accountant import gib
from components.titan.build import prepare
from components.titan.tokenizer import vocabulary_size
from launch.config.combinations import check_combinations
from launch.config.decay import check_decay_patterns
from launch.config.origins import place_of
from launch.config.schema import walk
from launch.summary import memory_terms

# torch shards block masks over context ranks in whole blocks of this many tokens.
MASK_BLOCK = 128

Rule = Callable[[Recipe, int], Iterator[Problem]]

DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",
)


def check_recipe(
    recipe: Recipe, world_size: int, device: str, origins: dict[str, str] | None = None
) -> None:
    """Run every rule.

    Args:
        recipe: bound.
        world_size: ranks in the job.
        device: "cpu" or "cuda".
        origins: dotted key -> where it was set, for the messages.

    Raises:
        RecipeError: all problems found.
    """
    target = Target(device, world_size, recipe.hardware.memory)
    problems: list[Problem] = []
    if world_size < 1:
        problems = [Problem("hardware.ranks", f"{world_size} ranks; it must be at least 1")]
    else:
        problems = [problem for rule in RULES for problem in rule(recipe, world_size)]
        problems += _device_rules(recipe, device)
    # What follows computes with the values checked so far.
    problems = problems or list(_components(recipe, target))
    problems = problems or list(_host_memory(recipe, target))
    problems = problems or list(_torchtitan(recipe, world_size, device))
    if problems:
        places = origins or {}
        raise RecipeError([replace(p, where=p.where or place_of(places, p.path)) for p in problems])


def _model(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    for key, message in recipe.model.check():
        yield Problem(key, message)


def _model_in_run(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    for key, message in recipe.model.check_run(recipe):
        yield Problem(key, message)


def _data(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    for sentence in recipe.data.check():
        yield _from_sentence(sentence)


def _from_sentence(sentence: str) -> Problem:
    """A problem from "dotted.key: what is wrong"."""
    key, _, message = sentence.partition(": ")
    return Problem(key, message)


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
        return
    if seq_len > longest:
        message = f"{seq_len} is longer than model.max_seq_len {longest}"
        yield Problem("training.seq_len", message, f"use at most {longest}, or raise the model's")
    unit, because = sequence_unit(recipe)
    if seq_len % unit:
        yield Problem(
            "training.seq_len",
            f"{seq_len} is not a multiple of {unit} ({because})",
            f"nearest legal: {nearest_multiples(seq_len, unit)}; or change the degree",
        )


def sequence_unit(recipe: Recipe) -> tuple[int, str]:
    """What sequences must be a multiple of, and why.

    Sequence parallelism cuts a sequence evenly; context parallelism cuts it into two parts per rank
    (head and tail, for balance) and its attention masks into whole blocks, which a model without
    masks does not have.
    """
    parallel = recipe.parallelism
    tp = parallel.tensor_parallel_degree if parallel.enable_sequence_parallel else 1
    cp = parallel.context_parallel_degree
    unit, reasons = max(tp, 1), [f"tensor_parallel_degree {tp}"] if tp > 1 else []
    if cp > 1 and recipe.components.context_parallel.enabled:
        unit *= 2 * cp
        reasons.append(f"2 x context_parallel_degree {cp}")
    elif cp > 1:
        unit = math.lcm(unit * 2 * cp, cp * MASK_BLOCK)
        reasons.append(f"context_parallel_degree {cp} x blocks of {MASK_BLOCK} tokens")
    return unit, " and ".join(reasons)


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
        if parallel.data_parallel_shard_degree == -1:
            product = f"a product that divides {world_size}: {listed_divisors(world_size)}"
            hint = f"change hardware.ranks (or NGPU=), or the degrees to {product}"
        else:
            hint = (
                "change hardware.ranks (or NGPU=), a degree, or use data_parallel_shard_degree=-1"
            )
        yield Problem(
            "parallelism",
            f"the degrees multiply to {fixed} ({parts or 'all 1'}), but the job has "
            f"{_ranks(world_size)}",
            hint,
        )
        return
    layers = recipe.model.n_layers
    if parallel.pipeline_parallel_degree > layers:
        message = f"{parallel.pipeline_parallel_degree} stages for model.n_layers {layers}"
        yield Problem("parallelism.pipeline_parallel_degree", message, f"use at most {layers}")
    yield from _expert_degree(recipe, world_size)


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def _expert_degree(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    ep = recipe.parallelism.expert_parallel_degree
    dims = ParallelDims.from_config(recipe.parallelism, world_size)
    sparse = dims.dp_shard * dims.cp * dims.tp
    experts = recipe.model.n_experts
    whole = {f"the {_ranks(sparse)} of one replica": sparse}
    if experts:
        whole[f"the model's {experts} experts"] = experts
    if undivided := [name for name, number in whole.items() if number % ep]:
        yield Problem(
            "parallelism.expert_parallel_degree",
            f"{ep} does not divide {' nor '.join(undivided)}",
            f"legal: {listed_divisors(math.gcd(*whole.values()))}",
        )


def _batches(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    training = recipe.training
    for name in ("steps", "local_batch_size"):
        if getattr(training, name) < 1:
            message = f"{getattr(training, name)} is too few; it must be at least 1"
            yield Problem(f"training.{name}", message)
    # 0 would zero every gradient, and a negative one turn it around.
    if not training.max_norm > 0:
        message = f"{training.max_norm:g} is not a norm to clip gradients to; it must be above 0"
        yield Problem("training.max_norm", message, "such as 1.0; 1e30 clips nothing")
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
            f"nearest legal: {f'{down} or ' if down else ''}{down + step}; -1: no accumulation",
        )
    if training.global_batch_size == 0 or training.global_batch_size < -1:
        message = f"{training.global_batch_size} is not a batch size; use -1 or at least 1"
        yield Problem("training.global_batch_size", message)


def _cuda_graphs(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    if not recipe.training.disable_cuda_graphs:
        yield Problem(
            "training.disable_cuda_graphs",
            "false is not possible: CUDA graphs cannot hold expert dispatch, it waits for the host",
            "set it to true",
        )


def _schedule(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    for name in ("decay_ratio", "min_lr_factor"):
        value = getattr(recipe.lr_scheduler, name)
        if value is not None and not 0 <= value <= 1:
            yield Problem(f"lr_scheduler.{name}", f"{value} is not a fraction; legal: 0 to 1")
    if recipe.lr_scheduler.total_steps == 0:
        yield Problem("lr_scheduler.total_steps", "0 steps; use null for training.steps")


def _folders(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    folders = {"output_dir": recipe.output_dir, "data.cache_dir": recipe.data.cache_dir}
    for key, folder in folders.items():
        if not folder.strip():
            yield Problem(key, f"{shown(folder)} is not the name of a folder", "such as outputs")
        elif folder.startswith("~"):
            hint = f"write {Path(folder).expanduser()}"
            yield Problem(key, f"{shown(folder)}: only a shell replaces the ~", hint)


def _validation(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    if recipe.validation.enabled and recipe.data.held_out == 0:
        message = "true needs held-out documents, and data.held_out is 0"
        hint = "set data.held_out=0.05, or validation.enabled=false"
        yield Problem("validation.enabled", message, hint)
    if recipe.validation.every < 1:
        message = f"{recipe.validation.every} is too few steps; it must be at least 1"
        yield Problem("validation.every", message)
    if recipe.validation.batches < 1 and recipe.validation.batches != -1:
        message = f"{recipe.validation.batches} is not a number of batches; use -1 or at least 1"
        yield Problem("validation.batches", message)


def _components(recipe: Recipe, target: Target) -> Iterator[Problem]:
    enabled = enabled_components(recipe.components)
    names = [component.name for component in enabled]
    for component in enabled:
        for needed in component.requires:
            if needed not in names:
                hint = f"set components.{needed}.enabled=true"
                yield Problem(component.path, f"needs components.{needed}, which is off", hint)
        for other in component.excludes:
            if other in names:
                hint = "switch one of them off"
                yield Problem(component.path, f"cannot be on with components.{other}", hint)
        yield from component.check(recipe, target)


def _host_memory(recipe: Recipe, target: Target) -> Iterator[Problem]:
    """What all components together keep on a machine; each alone has been checked."""
    memory = recipe.hardware.host_memory
    if memory is None:
        return
    kept = [term for term in memory_terms(recipe, target) if term.where == "host"]
    ranks = min(target.ranks, recipe.hardware.ranks_per_node)
    needed = ranks * sum(term.nbytes for term in kept)
    if needed > memory:
        each = "; ".join(f"{term.name}, {gib(term.nbytes)}" for term in kept)
        yield Problem(
            "hardware.host_memory",
            f"{gib(memory)} of a machine do not hold the {gib(needed)} of its {_ranks(ranks)} "
            f"(each: {each})",
            "use more ranks, fewer per machine (hardware.ranks_per_node), less offload (a smaller "
            "host_budget_gib), or machines with more memory",
        )


def _device_rules(recipe: Recipe, device: str) -> list[Problem]:
    problems = []
    try:
        recipe.model.on_one_rank(recipe).choose_kernels(device, compute_itemsize(recipe))
    except ValueError as error:
        problems.append(_from_sentence(str(error)))
    if device == "cpu" and recipe.training.enable_cpu_offload:
        message = "true needs a GPU to offload from; this run is on the CPU"
        problems.append(Problem("training.enable_cpu_offload", message))
    if device == "cpu" and recipe.checkpoint.async_mode == "async_with_pinned_mem":
        message = "'async_with_pinned_mem' needs a GPU; this run is on the CPU"
        problems.append(Problem("checkpoint.async_mode", message, "use async or disabled"))
    if device == "cpu" and recipe.optimizer.implementation == "fused_opt_states_bf16":
        message = "'fused_opt_states_bf16' runs on CUDA only"
        problems.append(Problem("optimizer.implementation", message, "use fused"))
    return problems


def _torchtitan(recipe: Recipe, world_size: int, device: str) -> Iterator[Problem]:
    """What torchtitan says to the assembled run, and the components to each other."""
    try:
        run = prepare(recipe, Path(recipe.output_dir), device, world_size)
        run.config.model_spec.model.update_from_config(config=run.config)
        apply_overrides(run.config.override, run.config)
        yield from check_decay_patterns(recipe, run.config.model_spec.model)
    except (ValueError, NotImplementedError, AssertionError) as error:
        # torchtitan speaks of its own command line: --training.steps.
        text = re.sub(r"--(?=[a-z_]+\.)", "", str(error)) or type(error).__name__
        yield Problem(_key_named_in(text), f"the run cannot be assembled: {text}")


def _key_named_in(text: str) -> str:
    """The dotted key that a sentence is about: the first it names, in full or by its last part."""
    paths = [key.path for key in walk(Recipe)]
    text = text.replace("-", "_").lower()
    found = {
        match.start(): path
        for path in paths
        for name in (path, path.rpartition(".")[2])
        # Short words such as "enable" or "name" are just words.
        if ("." in name or "_" in name) and (match := re.search(rf"\b{re.escape(name)}\b", text))
    }
    return found[min(found)] if found else ""


RULES: tuple[Rule, ...] = (
    _model, _model_in_run, _data, _vocabulary, _lengths, _degrees, _batches, _schedule,
    _cuda_graphs, _validation, _folders, check_combinations,
)  # fmt: skip
