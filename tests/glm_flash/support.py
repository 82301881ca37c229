"""Run the native GLM-5.3-Flash model and transformers' on the same tokens and compare them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextIndexer,
    Glm5NextTextTopkRouter,
)

from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.trimmed import trim
from tests.glm_flash.oracle import Reference, grads_of, load_into, settings_of


@dataclass
class Result:
    """What one model makes of one batch.

    Attributes:
        hidden: (tokens, dim), after the final norm.
        logits: (tokens, vocabulary).
        pools: per sparse layer, bool (tokens, pools of the longest document): what it attends to.
        grads: by the native model's parameter names; parameters without one are absent.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    pools: list[torch.Tensor]
    grads: dict[str, torch.Tensor]


def build_native(reference: Reference, trimmed: bool = False, **changes: Any) -> nn.Module:
    """The native model with ``reference``'s values.

    Args:
        trimmed: whether the sites of ``components.precision_trimming`` are on.
        changes: of ``GlmFlashModel``'s keys.
    """
    settings = settings_of(reference.config) | changes
    config = GlmFlashModel(**settings).build_spec().model
    if trimmed:
        trim(config)
    native = config.build()
    native.init_states()
    load_into(native, reference)
    return native


def draw_tokens(length: int, seed: int = 0, vocab_size: int = 97) -> torch.Tensor:
    """int64 (length,). Never 0, which transformers pads with and gives no gradient."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(1, vocab_size, (length,), generator=generator)


def draw_cotangents(length: int, reference: Reference, seed: int = 0) -> list[torch.Tensor]:
    """Gradients to push into a document's hidden states and logits, (length, width) each."""
    generator = torch.Generator().manual_seed(2000 + seed)
    widths = (reference.config.hidden_size, reference.config.vocab_size)
    return [torch.randn(length, width, generator=generator) for width in widths]


def restarting_positions(lengths: Sequence[int], rows: int = 1) -> torch.Tensor:
    """int64 (rows, tokens of a row): documents one after the other, in order through the rows.

    A document that does not fit into its row goes on in the next, where it counts on as the data
    loader does; the model must treat that row as a new document.
    """
    return torch.cat([torch.arange(length) for length in lengths]).view(rows, -1)


@contextmanager
def captured(model: nn.Module, kind: Callable[[str, nn.Module], bool]) -> Iterator[list[Any]]:
    """Outputs of every module that ``kind(name, module)`` accepts, in the order of the calls."""
    outputs: list[Any] = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: outputs.append(output))
        for name, module in model.named_modules()
        if kind(name, module)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def run_reference(
    reference: Reference, tokens: torch.Tensor, cotangents: Sequence[torch.Tensor]
) -> Result:
    """One document ``tokens`` int64 (length,), forward and backward."""
    reference.zero_grad(set_to_none=True)
    with captured(reference, lambda name, _: name.endswith(".indexer")) as indices:
        hidden, logits = (t.squeeze(0) for t in reference(tokens.unsqueeze(0)))
    torch.autograd.backward([hidden, logits], list(cotangents))
    pools = [pools_of_tokens(ids.squeeze(0), reference.config.index_kpool) for ids in indices]
    return Result(hidden.detach(), logits.detach(), pools, grads_of(reference))


def run_native(
    native: nn.Module,
    tokens: torch.Tensor,
    cotangents: Sequence[torch.Tensor],
    positions: torch.Tensor | None = None,
) -> Result:
    """Any batch, forward and backward.

    Args:
        tokens: int64 (all tokens,), in the order of ``positions``'s rows.
        positions: int64 (B, L); one document by default.
    """
    if positions is None:
        positions = torch.arange(len(tokens)).unsqueeze(0)
    native.zero_grad(set_to_none=True)
    with (
        captured(native, lambda name, _: name == "norm") as hiddens,
        captured(native, lambda name, _: name.endswith(".indexer")) as indices,
    ):
        logits = native(tokens.view_as(positions), positions=positions)
    hidden = hiddens[0].flatten(0, -2)
    logits = logits.flatten(0, -2)
    torch.autograd.backward([hidden, logits], list(cotangents))
    grads = {name: p.grad for name, p in native.named_parameters() if p.grad is not None}
    pools = [_one_hot(ids, _longest_pools(native, positions)) for ids in indices]
    return Result(hidden.detach(), logits.detach(), pools, grads)


def _longest_pools(native: nn.Module, positions: torch.Tensor) -> int:
    """Complete pools of the longest document."""
    sizes = {m.config.kpool for name, m in native.named_modules() if name.endswith(".indexer")}
    return (int(positions.max()) + 1) // sizes.pop()


def _one_hot(ids: torch.Tensor, width: int) -> torch.Tensor:
    """bool (tokens, width) of ids (tokens, n) in which negative ones mean nothing."""
    chosen = torch.zeros(ids.shape[0], width + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(ids < 0, width, ids.long()), True)
    return chosen[:, :width]


def pools_of_tokens(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Complete pools chosen by each query of one document, from the ids of their tokens.

    The tail, the query's own incomplete pool, is left out: every query takes it whole.
    """
    length = ids.shape[0]
    tokens = _one_hot(ids, length)
    complete = (torch.arange(length) + 1) // size
    tail = tokens & (torch.arange(length) >= size * complete.unsqueeze(1))
    expected = (torch.arange(length) + 1) % size
    assert torch.equal(tail.sum(1), expected)
    chosen = tokens[:, : length // size * size].view(length, -1, size)
    whole = chosen.all(2)
    open_pools = torch.arange(length // size) < complete.unsqueeze(1)
    assert torch.equal(whole & open_pools, chosen.any(2) & open_pools)
    return whole & open_pools


def relative_error(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of what is expected (at least ``floor``)."""
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp(min=max(floor, 1e-30))).item()


def worst_row(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of any token's row."""
    difference = (actual.double() - expected.double()).norm(dim=-1)
    return (difference / expected.double().norm(dim=-1)).max().item()


def gradient_errors(actual: Result, expected: Result) -> dict[str, float]:
    """Relative error of every gradient. Both must have the same ones.

    Where zero is expected (a query with a single key, a decay with nothing to decay) rounding may
    leave something; it is compared with a thousandth of the largest gradient.
    """
    assert actual.grads.keys() == expected.grads.keys()
    scale = 1e-3 * max(grad.norm().item() for grad in expected.grads.values())
    return {
        name: relative_error(actual.grads[name], grad, floor=0.0 if grad.any() else scale)
        for name, grad in expected.grads.items()
    }


@torch.no_grad()
def smallest_margin(reference: Reference, tokens: torch.Tensor) -> float:
    """How close the closest selection of pools or experts is to turning out otherwise.

    Two correct implementations may choose differently where the margin is of the size of float32's
    rounding, so comparisons are made on models and tokens where it is not. Computed in float64 from
    the definitions.

    Args:
        tokens: int64 (length,), one document.

    Returns:
        The gap between the last chosen and the first not chosen, as a share of the scores' scale.
    """
    margins = [1.0]

    def at_indexer(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        margins.append(_pool_margin(module, kwargs["hidden_states"][0], kwargs["q_resid"][0]))

    def at_router(module: nn.Module, args: tuple) -> None:
        margins.append(_expert_margin(module, args[0].reshape(-1, args[0].shape[-1])))

    hooks = []
    for module in reference.modules():
        if isinstance(module, Glm5NextTextIndexer):
            hooks.append(module.register_forward_pre_hook(at_indexer, with_kwargs=True))
        elif isinstance(module, Glm5NextTextTopkRouter):
            hooks.append(module.register_forward_pre_hook(at_router))
    reference(tokens.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    return min(margins)


def _pool_margin(indexer: Any, x: torch.Tensor, latent: torch.Tensor) -> float:
    scores = index_scores(indexer, x, latent)
    count = indexer.index_topk // indexer.index_kpool
    complete = (torch.arange(len(x)) + 1) // indexer.index_kpool
    margins = [1.0]
    for row, open_pools in zip(scores, complete.tolist(), strict=True):
        if open_pools > count:
            best = row[:open_pools].topk(count + 1).values
            margins.append(((best[-2] - best[-1]) / row[:open_pools].abs().max()).item())
    return min(margins)


def index_scores(indexer: Any, x: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """Scores of all complete pools of one document, float64 (length, pools), from the definition.

    Args:
        indexer: transformers' module, for its weights.
        x: (length, dim), its input.
        latent: (length, q rank), normalised query latent.
    """
    p = {name: value.double() for name, value in indexer.state_dict().items()}
    x, latent, size = x.double(), latent.double(), indexer.index_kpool
    width = indexer.head_dim
    keys = nn.functional.layer_norm(
        x @ p["wk.weight"].T, (width,), p["k_norm.weight"], p["k_norm.bias"], eps=1e-6
    )
    gates = x @ p["index_kpool_compress_gate"].T
    whole = len(x) // size * size
    logits = gates[:whole].view(-1, size, width) + p["index_kpool_compress_ape"]
    pooled = (logits.softmax(1) * keys[:whole].view(-1, size, width)).sum(1)
    queries = (latent @ p["wq_b.weight"].T).view(len(x), -1, width)
    weights = x @ p["weights_proj.weight"].T * queries.shape[1] ** -0.5
    return torch.einsum("th,thp->tp", weights, (queries @ pooled.T * width**-0.5).relu())


def _expert_margin(router: Any, x: torch.Tensor) -> float:
    scores = (x.double() @ router.weight.double().T).sigmoid() + router.e_score_correction_bias
    groups = scores.view(len(x), router.num_group, -1)
    margins = [1.0]
    if router.topk_group < router.num_group:
        best = groups.topk(2).values.sum(-1).topk(router.topk_group + 1)
        margins.append((best.values[:, -2] - best.values[:, -1]).min().item())
        kept = torch.zeros_like(groups[..., 0]).scatter(1, best.indices[:, :-1], 1.0).bool()
        scores = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    best = scores.topk(router.top_k + 1).values
    margins.append((best[:, -2] - best[:, -1]).min().item())
    return min(margins)
