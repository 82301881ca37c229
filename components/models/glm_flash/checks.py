"""What is wrong with a ``GlmFlashModel``, by itself and within its recipe."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from components.core.problems import divisors, nearest_multiples, shown
from components.core.sizes import FLOAT32
from components.models.glm_flash.tensor_parallel import check_tensor_parallel
from components.models.ranges import below, not_positive, uneven_expert_widths
from components.models.settings import Finding
from kernels.dsa import dense

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.models.glm_flash.settings import GlmFlashModel

_MIXERS = ("kda", "dsa")
_AT_LEAST_ONE = (
    "n_layers", "dim", "vocab_size", "max_seq_len",
    "kda_heads", "kda_head_dim", "conv_kernel",
    "n_heads", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim",
    "index_n_heads", "index_head_dim", "index_topk", "index_kpool",
    "dense_hidden_dim", "n_experts", "top_k", "expert_hidden_dim",
    "n_expert_groups", "n_limited_groups", "hc_mult", "hc_sinkhorn_iters",
)  # fmt: skip
_AT_LEAST_ZERO = ("n_dense_layers", "n_shared_experts", "load_balance_coeff")
_ABOVE_ZERO = ("route_scale", "swiglu_limit", "hc_eps", "norm_eps", "init_std")

# Kernels undo the decay of sixteen tokens: e^75 at -5, and float32 ends at e^88.
_STRONGEST_DECAY = -5.0
# Of a query in the latent, in backward: absorbed, attended, and the gradients of both.
_TENSORS = 4
# A group is ranked by the sum of its best two scores.
_SMALLEST_GROUP = 2


def check_model(model: "GlmFlashModel") -> list[Finding]:
    """List every problem that the settings have among themselves."""
    found = [*_ranges(model), *_positions(model)]
    if not found:
        # Divisibility is worth reading only once every number is in range.
        found = [*_layers(model), *_indexer(model), *_chunk(model)]
        if model.n_experts is not None:
            found += [*_groups(model, model.n_experts), *_routing(model, model.n_experts)]
            found += uneven_expert_widths(model, ("dim", "expert_hidden_dim"))
    return found


def _positions(model: "GlmFlashModel") -> Iterator[Finding]:
    position = model.position
    for name, value in (("kind", position.kind), ("scaling", position.scaling)):
        if value != "none":
            message = (
                f"{value!r}: this model embeds no positions; the decay and the convolutions of its "
                "KDA layers tell the order of tokens, at any length; legal: 'none'"
            )
            yield f"model.position.{name}", message
            return
    yield from position.check()


def check_run(model: "GlmFlashModel", recipe: "Recipe") -> list[Finding]:
    """List every problem between the model and the rest of its recipe."""
    parallel = recipe.parallelism
    found = check_tensor_parallel(model, recipe)
    if parallel.context_parallel_degree > 1 and not recipe.components.context_parallel.enabled:
        message = (
            f"{parallel.context_parallel_degree}: torchtitan's own context parallelism knows none "
            "of this model's mixers; use components.context_parallel.enabled=true, or 1"
        )
        found.append(("parallelism.context_parallel_degree", message))
    found += _dense_attention(model, recipe)
    if parallel.expert_parallel_degree > 1 and model.n_experts is None:
        message = (
            f"{parallel.expert_parallel_degree} with model.n_experts = null: there are no experts "
            "to share; use 1"
        )
        found.append(("parallelism.expert_parallel_degree", message))
    if parallel.spmd_backend != "spmd_types":
        message = f"{parallel.spmd_backend!r} cannot shard this model; use 'spmd_types'"
        found.append(("parallelism.spmd_backend", message))
    if recipe.compile.enable and "model" in recipe.compile.components:
        message = (
            f"{shown(recipe.compile.components)}: this model's layers call their kernels as they "
            "are and are not compiled; use [loss], or compile.enable=false"
        )
        found.append(("compile.components", message))
    return found


def _dense_attention(model: "GlmFlashModel", recipe: "Recipe") -> Iterator[Finding]:
    """Keys and values are of the tokens of all context ranks and all tensor ranks."""
    if model.sparse_mla_kernel != "dense" or "dsa" not in model.layer_types:
        return
    tokens = recipe.training.local_batch_size * recipe.training.seq_len
    reason = dense.too_long(tokens, model.qk_head_dim + model.v_head_dim)
    if reason is not None:
        yield "model.sparse_mla_kernel", reason


def _ranges(model: "GlmFlashModel") -> Iterator[Finding]:
    yield from below(model, _AT_LEAST_ONE, 1)
    yield from below(model, _AT_LEAST_ZERO, 0)
    yield from not_positive(model, _ABOVE_ZERO)
    bound = model.gate_lower_bound
    if not _STRONGEST_DECAY <= bound < 0:
        message = f"{bound} is no log decay that KDA can compute; legal: {_STRONGEST_DECAY:g} or "
        yield "model.gate_lower_bound", message + "more, and below 0"


def _layers(model: "GlmFlashModel") -> Iterator[Finding]:
    types, n_layers = model.layer_types, model.n_layers
    for index, mixer in enumerate(types):
        if mixer not in _MIXERS:
            yield f"model.layer_types[{index}]", f"{shown(mixer)} is no mixer; legal: kda, dsa"
    if len(types) != n_layers:
        instead = f", or model.n_layers {len(types)}" if types else ""
        yield (
            "model.layer_types",
            f"the list has {_entries(len(types))} and model.n_layers is {n_layers}; legal: "
            f"{_entries(n_layers)}, each kda or dsa{instead}",
        )
    dense = model.n_dense_layers
    if dense > n_layers:
        message = f"{dense} is more than model.n_layers = {n_layers}; legal: 0 to {n_layers}"
        yield "model.n_dense_layers", message
    elif dense == n_layers and model.n_experts is not None:
        message = (
            f"{model.n_experts} has no effect where all model.n_layers = {n_layers} are dense; "
            f"legal: null, or model.n_dense_layers 0 to {n_layers - 1}"
        )
        yield "model.n_experts", message
    elif dense < n_layers and model.n_experts is None:
        message = (
            f"null with model.n_dense_layers = {dense} of model.n_layers = {n_layers} leaves the "
            f"others without experts; legal: 1 or more, or model.n_dense_layers {n_layers}"
        )
        yield "model.n_experts", message


def _indexer(model: "GlmFlashModel") -> Iterator[Finding]:
    pool, keys = model.index_kpool, model.index_topk
    if keys % pool:
        yield (
            "model.index_kpool",
            f"{pool} does not divide model.index_topk = {keys}, and whole pools are selected; "
            f"nearest legal: {_nearest_divisors(pool, keys)}, or model.index_topk "
            f"{nearest_multiples(keys, pool)}",
        )


def _chunk(model: "GlmFlashModel") -> Iterator[Finding]:
    least = _TENSORS * model.n_heads * model.kv_lora_rank * FLOAT32
    if model.sparse_mla_chunk < least:
        message = f"{model.sparse_mla_chunk} bytes do not hold one query; legal: {least} or more"
        yield "model.sparse_mla_chunk", message


def _groups(model: "GlmFlashModel", experts: int) -> Iterator[Finding]:
    groups, limited = model.n_expert_groups, model.n_limited_groups
    legal = [n for n in divisors(experts) if n == 1 or experts // n >= _SMALLEST_GROUP]
    if groups not in legal:
        message = (
            f"{groups} does not cut model.n_experts = {experts} into equal groups of "
            f"{_SMALLEST_GROUP} or more; legal: {', '.join(map(str, legal))}"
        )
        yield "model.n_expert_groups", message
    if limited > groups:
        message = f"{limited} is more than model.n_expert_groups = {groups}; legal: 1 to {groups}"
        yield "model.n_limited_groups", message


def _routing(model: "GlmFlashModel", experts: int) -> Iterator[Finding]:
    groups, limited, top_k = model.n_expert_groups, model.n_limited_groups, model.top_k
    within = experts // groups * min(limited, groups)
    if top_k > experts:
        message = f"{top_k} is more than model.n_experts = {experts}; legal: 1 to {experts}"
        yield "model.top_k", message
    elif top_k > within and experts % groups == 0:
        yield (
            "model.top_k",
            f"{top_k} is more than the {within} experts of model.n_limited_groups = {limited} of "
            f"model.n_expert_groups = {groups} groups; legal: 1 to {within}, or more groups",
        )
    if top_k == 1 and model.route_norm:
        yield (
            "model.route_norm",
            "true with model.top_k = 1 makes every routing weight the same, so the router would "
            "learn nothing; legal: false, or model.top_k 2 or more",
        )


def _nearest_divisors(value: int, number: int) -> str:
    """The divisors of ``number`` on both sides of ``value``, as "2 or 4"."""
    smaller = [n for n in divisors(number) if n < value][-1:]
    larger = [n for n in divisors(number) if n > value][:1]
    return " or ".join(map(str, smaller + larger))


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"
