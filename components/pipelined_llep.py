"""Routed experts whose rows are spread evenly over the ranks, a chunk of the tokens at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.core.base import MemoryTerm, Target
from components.core.problems import Problem
from components.core.units import Tokens
from components.expert_dispatch.balanced_experts import balanced_experts
from components.expert_dispatch.partition import ChunkRule, Membership
from components.expert_dispatch.planned import PlannedExperts, kept_product_bytes
from components.expert_dispatch.sizes import routed_tokens
from components.titan.plan import RunPlan

if TYPE_CHECKING:
    from components.core.recipe import Recipe


class PipelinedLlep(PlannedExperts):
    """``components.llep``, and of the rows that are exchanged only a chunk's exist at one time.

    A layer's plan is made once, weights are copied once in forward and once in backward, and
    gradients of copies go home once, however many chunks. Every piece of the plan takes the same
    share of each chunk as of the layer, so a chunk is even as far as it is routed like the whole,
    which is what ``membership`` is about. No rank can receive more than ranks x top_k x chunk rows,
    whatever the router does; planned, it receives about top_k x chunk.
    """

    name = "pipelined_llep"
    summary = "llep in chunks of tokens: dispatched rows are bounded by the chunk, not the router"
    source = "arXiv 2609.14306, section 3.1; the backward in chunks is this project's"
    # It would run the experts, and every exchange, a third time: it knows no kept outputs.
    excludes = ("full_recompute", "sequence_chunked_moe")

    @dataclass(kw_only=True, slots=True)
    class Config(PlannedExperts.Config):
        chunk_tokens: Tokens = 4096
        """Tokens of one rank that are dispatched at a time; less than the rank holds. Fewer need
        less memory and take more, smaller exchanges and matrix products."""

        max_chunks: int = 10
        """Chunks at most, 2 or more: every chunk costs a round of exchanges, and the first ten take
        most of what there is to save. Beyond chunk_tokens x max_chunks tokens the chunks grow
        instead."""

        membership: Membership = "strided"
        """Which tokens make chunk i of K. strided: i, i + K, i + 2K, ... A plan places an expert's
        rows by their order and neighbours are routed alike, so a contiguous chunk may send most of
        its rows to one rank while a strided one repeats the spread of the whole. contiguous:
        neighbours."""

        kept_chunks: int = 0
        """Chunks whose gate and up projections every layer keeps for its backward, the last ones,
        instead of computing them again: 2 x top_k x (width of an expert) values per token of
        theirs, 0 or more. Nine products per step instead of eleven where all are kept."""

        rounded_sums: bool = False
        """Round the sums of parameters' gradients to the parameters' dtype after each chunk. Half
        the memory of float32 sums; one rounding per chunk."""

        def __post_init__(self) -> None:
            PlannedExperts.Config.__post_init__(self)
            self.rule()
            if self.max_chunks < 2:
                raise ValueError(
                    f"max_chunks is {self.max_chunks}, which cuts nothing; legal: 2 or more, or "
                    "components.llep, which does not cut"
                )
            if not 0 <= self.kept_chunks <= self.max_chunks:
                raise ValueError(
                    f"kept_chunks is {self.kept_chunks}; legal: 0 to max_chunks, which is "
                    f"{self.max_chunks}"
                )

        def rule(self) -> ChunkRule:
            """How tokens are cut."""
            return ChunkRule(
                chunk_tokens=self.chunk_tokens,
                max_chunks=self.max_chunks,
                membership=self.membership,
            )

        def sums_are_float32(self) -> bool:
            """See the base class."""
            return not self.rounded_sums

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        yield from PlannedExperts.check(self, recipe, target)
        if self.config.kept_chunks and recipe.components.layer_recompute.enabled:
            yield Problem(
                f"{self.path}.kept_chunks",
                f"{self.config.kept_chunks} keeps products in every layer, which "
                "components.layer_recompute is there to avoid",
                "use 0, or components.layer_recompute.enabled=false",
            )
        tokens, training = routed_tokens(recipe), recipe.training
        if recipe.model.n_experts is not None and self.config.chunk_tokens >= tokens:
            yield Problem(
                f"{self.path}.chunk_tokens",
                f"{self.config.chunk_tokens} is all of the {tokens} tokens that reach the experts "
                f"of one rank at a time (training.local_batch_size {training.local_batch_size}, "
                f"training.seq_len {training.seq_len}), which saves nothing",
                f"use less than {tokens}, components.llep, or {self.path}.enabled=false",
            )

    def apply(self, plan: RunPlan) -> None:
        config = self.config
        plan.override(
            self.name,
            balanced_experts,
            capacity_factor=config.capacity_factor,
            minimum_rows=config.minimum_rows,
            threshold=config.threshold,
            chunk_tokens=config.chunk_tokens,
            max_chunks=config.max_chunks,
            membership=config.membership,
            kept_chunks=config.kept_chunks,
            rounded_sums=config.rounded_sums,
        )

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """With ``kept_chunks``, what all layers keep of their experts' products."""
        found = PlannedExperts.memory_terms(self, recipe, target)
        kept = kept_product_bytes(recipe, self.config.kept_chunks)
        return [*found, MemoryTerm("gate and up of kept chunks", kept)] if kept else found
