"""What `make check` reports about a recipe that passed: sizes, mesh, tokens per step."""

from typing import cast

from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder

from components.core.base import MemoryTerm, Target
from components.core.recipe import Recipe
from components.core.registry import component_types, enabled_components, loss_term
from components.models.counts import count_parameters
from components.models.position import table_bytes
from components.titan.batch import sequences_per_pass, sequences_per_step

_RECOMPUTE = ("full_recompute", "layer_recompute")


def summarise(recipe: Recipe, target: Target) -> str:
    """A few lines on what the run would be. Allocates nothing."""
    terms = memory_terms(recipe, target)
    lines = [
        ("recipe", recipe.description or "(no description)"),
        ("model", _model(recipe)),
        ("mesh", _mesh(recipe, target.ranks)),
        ("batch", _batch(recipe, target.ranks)),
        *(("memory", _term(term)) for term in terms),
        ("total", _total(terms, target)),
        *(("traffic", line) for line in _traffic(recipe, target)),
        ("components", _components(recipe)),
        ("result", _result(terms, target)),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def memory_terms(recipe: Recipe, target: Target) -> list[MemoryTerm]:
    """What one rank needs, as far as it is known before a run.

    Activations inside layers are estimated for models that say what their layers keep.
    """
    activations = _activations(recipe, target)
    estimated = recipe.model.layer_saved_bytes(recipe, target.device) is not None
    spec = recipe.model.build_spec()
    total = count_parameters(spec).total
    dims = ParallelDims.from_config(recipe.parallelism, target.ranks)
    nbytes = total * recipe.optimizer.bytes_per_parameter(recipe.training.dtype)
    state = MemoryTerm(
        "parameters, gradients and AdamW moments",
        nbytes * dims.dp_replicate // target.ranks,
        "host" if recipe.training.enable_cpu_offload else "device",
        ("" if estimated else "activations inside layers, ")
        + "buffers and communication come on top",
    )
    nbytes = table_bytes(cast(Decoder.Config, spec.model), recipe.training.seq_len)
    tables = [MemoryTerm("rotary tables of the whole sequence", nbytes)] if nbytes else []
    enabled = enabled_components(recipe.components)
    of_components = (t for component in enabled for t in component.memory_terms(recipe, target))
    return [state, *tables, *of_components, *activations]


def _activations(recipe: Recipe, target: Target) -> list[MemoryTerm]:
    """What layers hold inside, as far as the model says it, and what the loss holds.

    No layer runs while the loss does, so what they need for a while is not added up.
    """
    loss = loss_term(recipe, target)
    working = recipe.model.layer_working_set_bytes(recipe, target.device)
    kept = recipe.model.layer_saved_bytes(recipe, target.device)
    if working is None or kept is None:
        return [loss]
    if any(component.name in _RECOMPUTE for component in enabled_components(recipe.components)):
        name = "working set of the layer that needs most, while it is recomputed"
        return [_larger(MemoryTerm(name, max(working), note="at most"), loss)]
    passing = max(max(w - k, 0) for w, k in zip(working, kept, strict=True))
    temporary = MemoryTerm("temporary tensors of one layer's backward", passing, note="at most")
    inside = MemoryTerm("activations inside all layers, kept for backward", sum(kept))
    return [inside, _larger(temporary, loss)]


def _traffic(recipe: Recipe, target: Target) -> list[str]:
    enabled = enabled_components(recipe.components)
    return [line for component in enabled for line in component.traffic(recipe, target)]


def _larger(first: MemoryTerm, second: MemoryTerm) -> MemoryTerm:
    return max(first, second, key=lambda term: term.nbytes)


def _term(term: MemoryTerm) -> str:
    note = f" ({term.note})" if term.note else ""
    return f"{term.nbytes / 2**30:.2f} GiB per rank on the {term.where}: {term.name}{note}"


def _gib(terms: list[MemoryTerm], where: str) -> float:
    return sum(term.nbytes for term in terms if term.where == where) / 2**30


def _total(terms: list[MemoryTerm], target: Target) -> str:
    room = "" if target.memory is None else f" of {target.memory / 2**30:.0f}"
    device, host = _gib(terms, "device"), _gib(terms, "host")
    pinned = f", {host:.2f} GiB on the host" if host else ""
    return f"{device:.2f}{room} GiB per rank on the device{pinned}"


def _result(terms: list[MemoryTerm], target: Target) -> str:
    needed = _gib(terms, "device")
    if target.memory is not None and needed > target.memory / 2**30:
        room = target.memory / 2**30
        return f"the settings are right, but {needed:.0f} GiB DO NOT FIT into the {room:.0f} GiB"
    if target.memory is None:
        return "no problem found; not compared with a device, as hardware.memory is not set"
    return "no problem found"


def _model(recipe: Recipe) -> str:
    spec = recipe.model.build_spec()
    counts = count_parameters(spec)
    return (
        f"{spec.name} {spec.flavor}, {_large(counts.total)} parameters, "
        f"{_large(counts.active_per_token)} active per token, {recipe.model.n_layers} layers"
    )


def _mesh(recipe: Recipe, ranks: int) -> str:
    dims = ParallelDims.from_config(recipe.parallelism, ranks)
    degrees = {
        "replicate": dims.dp_replicate, "shard": dims.dp_shard, "context": dims.cp,
        "tensor": dims.tp, "pipeline": dims.pp, "expert": dims.ep,
    }  # fmt: skip
    shown = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    return f"{ranks} rank{'s' if ranks > 1 else ''}" + (f" = {shown}" if shown else "")


def _batch(recipe: Recipe, ranks: int) -> str:
    training = recipe.training
    per_pass, sequences = sequences_per_pass(recipe, ranks), sequences_per_step(recipe, ranks)
    tokens = sequences * training.seq_len
    text = f"{sequences} sequences of {training.seq_len:,} = {tokens:,} tokens per step"
    if sequences != per_pass:
        text += f", {sequences // per_pass} accumulation passes"
    return f"{text}, {training.steps:,} steps"


def _components(recipe: Recipe) -> str:
    enabled = [component.name for component in enabled_components(recipe.components)]
    off = [name for name in component_types() if name not in enabled]
    return f"on: {', '.join(enabled) or 'none'}; off: {', '.join(off) or 'none'}"


def _large(number: int) -> str:
    for factor, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= factor:
            return f"{number / factor:.2f}{letter}"
    return str(number)
