"""The vocabulary projection and cross entropy, a slice of the sequence at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

from components.core.base import Component, Target
from components.core.problems import Problem
from components.titan.padded_loss import PaddedChunkedLoss
from components.titan.plan import RunPlan

if TYPE_CHECKING:
    from components.core.recipe import Recipe


class ChunkedLoss(Component):
    """Never hold the logits of a whole sequence.

    torchtitan's ``ChunkedLossWrapper``: per chunk, project, take the loss and run backward at once,
    so that logits of local_batch_size x (seq_len / num_chunks) tokens exist instead of all.
    """

    name = "chunked_loss"
    summary = "logits of one sequence chunk at a time instead of the whole sequence"
    source = "torchtitan ChunkedLossWrapper"
    relieves = "logits"

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        num_chunks: int = 8
        """Chunks per sequence; the sequence length of one rank must be a multiple of it."""

        def __post_init__(self) -> None:
            if self.num_chunks < 1:
                raise ValueError(f"num_chunks is {self.num_chunks}; it must be at least 1")

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        chunks = self.config.num_chunks
        cp = recipe.parallelism.context_parallel_degree
        local = recipe.training.seq_len // cp
        if local % chunks and not recipe.components.context_parallel.enabled:
            legal = [n for n in range(2, min(local, 64) + 1) if local % n == 0]
            yield Problem(
                f"{self.path}.num_chunks",
                f"{chunks} does not divide the {local} tokens that one rank holds "
                f"(training.seq_len {recipe.training.seq_len} / context_parallel_degree {cp})",
                f"divisors up to 64: {', '.join(map(str, legal))}"
                if legal
                else f"no divisor up to 64: use another training.seq_len, or {self.path}.enabled="
                "false",
            )
        if chunks == 1:
            yield Problem(
                f"{self.path}.num_chunks",
                "1 chunk is the whole sequence, which saves nothing",
                f"use 2 or more, or {self.path}.enabled=false",
            )

    def apply(self, plan: RunPlan) -> None:
        # Shares of a batch that is cut between documents differ by a few tokens.
        uneven = plan.recipe.components.context_parallel.enabled
        kind = PaddedChunkedLoss if uneven else ChunkedLossWrapper
        loss = kind.Config(
            num_chunks=self.config.num_chunks,
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=plan.recipe.model.vocab_size),
        )
        plan.set_loss(self.name, loss)
