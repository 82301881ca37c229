"""Mixers, dense feed-forward parts and streams of a layer, a piece of the tokens at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.core.base import Component, MemoryTerm, Target
from components.core.problems import Problem, nearest_multiples
from components.core.sizes import FLOAT32, mixed_tokens
from components.core.units import Tokens
from components.models.glm_flash.block import GlmFlashBlock, rebuilding
from components.models.glm_flash.chunked.overrides import (
    chunked_dsa,
    chunked_feed_forward,
    chunked_kda,
    chunked_shared_expert,
)
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.tensor_parallel import part_of_rank
from components.models.glm_flash.working_set import form_of
from components.recompute.terms import kept_chunked_bytes
from components.titan.plan import RunPlan

if TYPE_CHECKING:
    from components.core.recipe import Recipe

_UNIT = 64
"""Tokens that KDA's kernels compute together."""

_FACTORIES = {
    "kda": chunked_kda,
    "dsa": chunked_dsa,
    "feed_forward": chunked_feed_forward,
    "shared_expert": chunked_shared_expert,
}


class SublayerChunking(Component):
    """Bound what one layer needs while it is differentiated, whatever the sequence length.

    Each chosen part keeps its input alone. In backward it runs once more, ``chunk_tokens`` tokens
    at a time, last tokens first, and what a chunk needs is gone before the next begins. Exact up to
    rounding: KDA hands its state from chunk to chunk, attention reads all keys, gradients of
    parameters are summed in float32.

    A part runs twice per step, as under plain recomputation. With ``components.layer_recompute`` it
    runs twice as well: the recomputed layer takes the part's kept output. Routed experts are
    ``components.sequence_chunked_moe``'s.
    """

    name = "sublayer_chunking"
    summary = "KDA, sparse attention and dense SwiGLU in chunks of tokens, forward and backward"
    source = "Reformer, arXiv 2001.04451, section 3; nested recomputation, arXiv 1604.06174"
    relieves = "activations"
    # It would run each part a third time: it knows no kept outputs.
    excludes = ("full_recompute",)

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        chunk_tokens: Tokens = 16384
        """Tokens of one rank that a part works on at a time; a multiple of 64, less than the rank
        holds. Fewer need less memory and give smaller matrix products."""

        kda: bool = True
        """KDA mixers: projections, convolutions, recurrence and norm."""

        dsa: bool = True
        """Sparse attention mixers, by queries; not beside components.indexer_training."""

        feed_forward: bool = True
        """SwiGLU of the dense layers."""

        shared_expert: bool = False
        """SwiGLU of the expert that every token visits; a sixth of a dense layer's width in
        GLM-5.3-Flash, so there is little to gain, but next to experts in chunks."""

        streams: bool = False
        """Residual streams between a layer's mixer and its feed-forward part: not kept, but merged
        again by each function that needs them in backward: two of the kernels', all at once, or
        three of plain torch, a block of tokens at a time. The same bits. In plain torch it takes
        components.precision_trimming.hyper_connections."""

        def __post_init__(self) -> None:
            if self.chunk_tokens < _UNIT or self.chunk_tokens % _UNIT:
                raise ValueError(
                    f"chunk_tokens is {self.chunk_tokens}; it must be a multiple of {_UNIT}, e.g. "
                    f"{nearest_multiples(self.chunk_tokens, _UNIT)}"
                )

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        if not isinstance(recipe.model, GlmFlashModel):
            yield Problem(
                f"{self.path}.enabled",
                "true needs a model whose parts can be cut; torchtitan's own layers cannot",
                "use a glm_flash model, or leave it out",
            )
            return
        tokens = mixed_tokens(recipe)
        cut = any(self._wanted(_counts(recipe.model)).values())
        if cut and self.config.chunk_tokens >= tokens:
            parts = recipe.parallelism.context_parallel_degree
            over = f", over parallelism.context_parallel_degree {parts}" if parts > 1 else ""
            yield Problem(
                f"{self.path}.chunk_tokens",
                f"{self.config.chunk_tokens} is all of the {tokens} tokens that one rank holds "
                f"(training.local_batch_size {recipe.training.local_batch_size} x training.seq_len "
                f"{recipe.training.seq_len}{over}), which saves nothing",
                f"use {f'a multiple of {_UNIT} below {tokens}, or ' if tokens > _UNIT else ''}"
                f"{self.path}.enabled=false",
            )
        yield from self._check_parts(recipe, target)

    def _check_parts(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        assert isinstance(recipe.model, GlmFlashModel)
        counts = _counts(recipe.model)
        if not self.config.streams and not any(self._wanted(counts).values()):
            there = ", ".join(f"{self.path}.{name}" for name, count in counts.items() if count)
            yield Problem(
                f"{self.path}.enabled",
                "true with no part to cut saves nothing",
                f"switch on one of {there}, {self.path}.streams; or {self.path}.enabled=false",
            )
        if self.config.streams:
            yield from self._check_streams(recipe, target)
        if self.config.dsa and counts["dsa"] and recipe.components.indexer_training.enabled:
            yield Problem(
                f"{self.path}.dsa",
                "true cannot be combined with components.indexer_training, whose loss reads all "
                "queries of a layer at once",
                f"{self.path}.dsa=false, or components.indexer_training.enabled=false",
            )

    def _check_streams(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        assert isinstance(recipe.model, GlmFlashModel)
        trimming = recipe.components.precision_trimming
        trimmed = trimming.enabled and trimming.hyper_connections is not False
        if not trimmed and not form_of(recipe.model, recipe, target.device).fused_streams:
            yield Problem(
                f"{self.path}.streams",
                "true merges streams again by components.precision_trimming.hyper_connections, "
                "which is off, or in kernels, which model.hyper_connections_kernel "
                f"{recipe.model.hyper_connections_kernel!r} does not choose on {target.device}",
                f"use components.precision_trimming.enabled=true, or {self.path}.streams=false",
            )

    def apply(self, plan: RunPlan) -> None:
        assert isinstance(plan.recipe.model, GlmFlashModel)
        for name, count in self._wanted(_counts(plan.recipe.model)).items():
            if count:
                plan.override(self.name, _FACTORIES[name], chunk_tokens=self.config.chunk_tokens)
        if self.config.streams:
            plan.swap(self.name, GlmFlashBlock.Config, rebuilding)

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """What a recomputed layer takes instead of running a part again."""
        recompute, model = recipe.components.layer_recompute, recipe.model
        if not recompute.enabled:
            return []
        assert isinstance(model, GlmFlashModel)
        tokens, wanted = mixed_tokens(recipe), self._wanted(_counts(model))
        outputs = sum(kept_chunked_bytes(recipe, layer) for layer in range(model.n_layers))
        cuts = (tokens - 1) // self.config.chunk_tokens
        heads = part_of_rank(model, recipe).kda_heads
        state = heads * model.kda_head_dim**2 * FLOAT32
        sizes = {
            "outputs of chunked parts, kept for recomputed layers": outputs,
            "states of KDA between chunks, kept for backward": wanted["kda"] * cuts * state,
        }
        return [MemoryTerm(name, size) for name, size in sizes.items() if size]

    def _wanted(self, counts: dict[str, int]) -> dict[str, int]:
        """Parts of each kind that are cut."""
        return {name: n if getattr(self.config, name) else 0 for name, n in counts.items()}


def _counts(model: GlmFlashModel) -> dict[str, int]:
    """Parts of each kind that there are, by the name of their switch."""
    shared = model.n_layers - model.n_dense_layers if model.n_shared_experts else 0
    return {
        "kda": model.layer_types.count("kda"),
        "dsa": model.layer_types.count("dsa"),
        "feed_forward": model.n_dense_layers,
        "shared_expert": shared,
    }
