"""Routed experts that hold the dispatched rows of a chunk of the tokens at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.core.base import Component, MemoryTerm, Target
from components.core.problems import Problem
from components.core.sizes import FLOAT32
from components.core.units import Tokens
from components.expert_dispatch.experts import chunked_experts
from components.expert_dispatch.partition import ChunkRule, Membership
from components.expert_dispatch.sizes import expert_parameters, kept_bytes, routed_tokens
from components.titan.plan import RunPlan

if TYPE_CHECKING:
    from components.core.recipe import Recipe


class SequenceChunkedMoE(Component):
    """Bound what a layer's routed experts need by a chunk of the tokens, not by all of them.

    The experts keep their tokens, weights and expert ids alone. In backward they run once more,
    ``chunk_tokens`` tokens of every rank at a time, exchanges between ranks included, and what a
    chunk needs is gone before the next begins: dispatched rows, and with them the excess of the
    rank whose experts are chosen most, are those of one chunk. Exact up to rounding: gradients of
    parameters are summed over the chunks in float32.

    The experts run twice per step, as under plain recomputation. With
    ``components.layer_recompute`` they run twice as well: the recomputed layer takes their kept
    output. Routers and shared experts are not touched.
    """

    name = "sequence_chunked_moe"
    summary = "routed experts in chunks of tokens, dispatch included, forward and backward"
    source = "arXiv 2609.14306, section 3.1 (chunks alone); nested recomputation, arXiv 1604.06174"
    relieves = "activations"
    # It would run the experts a third time: it knows no kept outputs.
    excludes = ("full_recompute",)

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        chunk_tokens: Tokens = 16384
        """Tokens of one rank that are dispatched at a time; less than the rank holds. Fewer need
        less memory and take more, smaller exchanges and matrix products."""

        max_chunks: int = 64
        """Chunks at most, 2 or more: every chunk costs a round of exchanges. Beyond chunk_tokens x
        max_chunks tokens the chunks grow instead."""

        membership: Membership = "strided"
        """Which tokens make chunk i of K. strided: i, i + K, i + 2K, ... Neighbours are of one
        document and are routed alike, so a strided chunk repeats the spread of the whole, while a
        contiguous one may send most of its rows to a few ranks. contiguous: neighbours."""

        def __post_init__(self) -> None:
            self.rule()
            if self.max_chunks < 2:
                raise ValueError(
                    f"max_chunks is {self.max_chunks}, which cuts nothing; legal: 2 or more"
                )

        def rule(self) -> ChunkRule:
            """How tokens are cut."""
            return ChunkRule(
                chunk_tokens=self.chunk_tokens,
                max_chunks=self.max_chunks,
                membership=self.membership,
            )

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        if recipe.model.n_experts is None:
            yield Problem(
                f"{self.path}.enabled",
                "true finds no routed experts: every layer of the model is dense",
                f"use a model with experts, or {self.path}.enabled=false",
            )
            return
        yield from self._check_tokens(recipe)
        yield from self._check_layout(recipe)

    def _check_tokens(self, recipe: "Recipe") -> Iterator[Problem]:
        tokens, training = routed_tokens(recipe), recipe.training
        if self.config.chunk_tokens >= tokens:
            yield Problem(
                f"{self.path}.chunk_tokens",
                f"{self.config.chunk_tokens} is all of the {tokens} tokens that reach the experts "
                f"of one rank at a time (training.local_batch_size {training.local_batch_size}, "
                f"training.seq_len {training.seq_len}), which saves nothing",
                f"use less than {tokens}, or {self.path}.enabled=false",
            )

    def _check_layout(self, recipe: "Recipe") -> Iterator[Problem]:
        backend = getattr(recipe.model, "comm_backend", "standard")
        if backend != "standard":
            yield Problem(
                f"{self.path}.enabled",
                f"true cannot be combined with model.comm_backend {backend!r}, whose buffers are "
                "those of one exchange of all tokens",
                f"use model.comm_backend=standard, or {self.path}.enabled=false",
            )
        if recipe.compile.enable and "model" in recipe.compile.components:
            yield Problem(
                "compile.components",
                f"[{', '.join(recipe.compile.components)}] compiles layers, and {self.path} runs "
                "their experts again in backward, where compiled code cannot follow",
                f"use [loss], compile.enable=false, or {self.path}.enabled=false",
            )

    def apply(self, plan: RunPlan) -> None:
        config = self.config
        plan.override(
            self.name,
            chunked_experts,
            chunk_tokens=config.chunk_tokens,
            max_chunks=config.max_chunks,
            membership=config.membership,
        )

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """What a recomputed layer takes instead of running its experts again, and the sums of one
        layer's gradients."""
        sizes = {
            "outputs of routed experts, kept for recomputed layers": kept_bytes(recipe),
            "float32 sums of one layer's expert gradients, in its backward": FLOAT32
            * expert_parameters(recipe),
        }
        return [MemoryTerm(name, size) for name, size in sizes.items() if size]
