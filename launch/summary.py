"""What `make check` reports about a recipe that passed: sizes, mesh, tokens per step."""

from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_spec import ModelSpec

from components.core.recipe import Recipe
from components.core.registry import component_types, enabled_components
from components.models.counts import count_parameters

_BYTES_PER_PARAMETER = {
    # fp32 parameters and gradients, two fp32 moments
    "float32": 4 + 4 + 8,
    # everything in bf16
    "bfloat16": 2 + 2 + 4,
}


def summarise(recipe: Recipe, ranks: int) -> str:
    """A few lines on what the run would be. Allocates nothing."""
    return "\n".join(
        f"{name:<12} {text}"
        for name, text in (
            ("recipe", recipe.description or "(no description)"),
            ("model", _model(recipe)),
            ("mesh", _mesh(recipe, ranks)),
            ("batch", _batch(recipe, ranks)),
            ("state", _state(recipe, ranks)),
            ("components", _components(recipe)),
            ("result", "no problem found"),
        )
    )


def _spec(recipe: Recipe) -> ModelSpec:
    return recipe.model.build_spec("varlen" if recipe.model.attention == "varlen" else "flex")


def _model(recipe: Recipe) -> str:
    spec = _spec(recipe)
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
    dims = ParallelDims.from_config(recipe.parallelism, ranks)
    training = recipe.training
    per_pass = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    sequences = training.global_batch_size if training.global_batch_size > 0 else per_pass
    tokens = sequences * training.seq_len
    text = f"{sequences} sequences of {training.seq_len:,} = {tokens:,} tokens per step"
    if sequences != per_pass:
        text += f", {sequences // per_pass} accumulation passes"
    return f"{text}, {training.steps:,} steps"


def _state(recipe: Recipe, ranks: int) -> str:
    """Parameters, gradients and moments; what activations need is not estimated here."""
    total = count_parameters(_spec(recipe)).total
    dims = ParallelDims.from_config(recipe.parallelism, ranks)
    shards = ranks // dims.dp_replicate
    per_rank = total * _BYTES_PER_PARAMETER[recipe.training.dtype] / shards / 2**30
    limit = recipe.hardware.memory
    text = f"{per_rank:.2f} GiB per rank for parameters, gradients and AdamW"
    if limit is None:
        return text
    room = limit / 2**30
    verdict = "DOES NOT FIT" if per_rank > room else "activations come on top"
    return f"{text}, of {room:.0f} GiB ({verdict})"


def _components(recipe: Recipe) -> str:
    enabled = [component.name for component in enabled_components(recipe.components)]
    off = [name for name in component_types() if name not in enabled]
    return f"on: {', '.join(enabled) or 'none'}; off: {', '.join(off) or 'none'}"


def _large(number: int) -> str:
    for factor, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= factor:
            return f"{number / factor:.2f}{letter}"
    return str(number)
