"""The vocabulary projection and cross entropy, shared by a ring of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims

from components.core.base import Component, MemoryTerm, Target
from components.core.problems import Problem, listed_divisors, nearest_multiples
from components.core.sizes import FLOAT32, local_tokens
from components.core.units import Tokens
from components.titan.head import keep_head_sharded
from components.titan.plan import RunPlan
from components.titan.ring_loss import RingLoss, Setting
from components.titan.story import narrate
from components.vocabulary.choice import Schedule, choose
from components.vocabulary.layout import VocabularyLayout
from components.vocabulary.strips import strip_bytes

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.trainer import RecipeTrainer


class RingDtp(Component):
    """A rank computes with 1 / degree of the output head and of its gradient, and holds one strip
    of logits.

    Each rank keeps the rows of the head that FSDP gave it, and its own tokens. With rings of all
    ranks (the default) these rows are its part. Smaller rings gather theirs from each other for
    every pass, and sum its gradient; with a degree of 1 that part is the whole head.
    Strips of logits (strip_rows x this rank's part of the vocabulary) are made, used and dropped.
    Statistics, the head's gradient and the loss are float32, whatever the layers compute in. On one
    rank it is a loss that takes the gradient from the strip that is there.
    """

    name = "ring_dtp"
    summary = (
        "each rank computes a part of the vocabulary, in strips; by default the head is never "
        "gathered"
    )
    source = "arXiv 2609.14306, section 3.2; the fused schedule is this project's"
    relieves = "logits"
    excludes = ("chunked_loss",)

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        degree: int | None = None
        """Consecutive ranks that share one copy of the head in the compute dtype, a divisor of the
        ranks that FSDP shards over; null: all of them. Fewer: rings that need not leave a machine,
        and a larger part of the vocabulary on each rank, gathered for every pass."""

        schedule: Setting = "auto"
        """How. fused: tokens of all ranks are gathered, a strip gives loss and gradients while it
        is there (three products). move_weights, move_activations: the paper's; a part of the head,
        or a rank's tokens, goes around the ring, twice, and every strip is computed twice (four
        products). auto: fused, which is the fastest for training; per-token log-probabilities, for
        evaluation, use the one of the others that moves fewer bytes."""

        strip_rows: Tokens = 4096
        """Tokens in one strip of logits, over all ranks of the ring; a multiple of its ranks. One
        strip exists at a time. Smaller ones save memory and make slower products: on one H200, with
        16,384 tokens, width 7168 and 200,000 entries, 1,024 rows take 250 ms and 8.9 GiB, 4,096
        take 216 ms and 10.0 GiB, 8,192 take 211 ms and 11.6 GiB."""

        def __post_init__(self) -> None:
            for name in ("degree", "strip_rows"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    or_null = " (or null)" if name == "degree" else ""
                    raise ValueError(f"{name} is {value}; it must be at least 1{or_null}")

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        parallel = recipe.parallelism
        if parallel.tensor_parallel_degree > 1:
            yield Problem(
                f"{self.path}.enabled",
                "true cannot be combined with parallelism.tensor_parallel_degree "
                f"{parallel.tensor_parallel_degree}, which cuts the vocabulary in its own way",
                f"use a degree of 1, or {self.path}.enabled=false",
            )
            return
        if parallel.spmd_backend == "full_dtensor":
            yield Problem(
                f"{self.path}.enabled",
                "true cannot be combined with parallelism.spmd_backend 'full_dtensor', whose "
                "hidden states are no plain tensors",
                f"use 'spmd_types', or {self.path}.enabled=false",
            )
        if recipe.model.build_spec().model.enable_weight_tying:
            yield Problem(
                f"{self.path}.enabled",
                "true needs an output head of its own; this model's is the input embedding, which "
                "every rank looks its tokens up in",
                f"use a model without tied embeddings, or {self.path}.enabled=false",
            )
        yield from self._check_ring(recipe, target)

    def _check_ring(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        dims = ParallelDims.from_config(recipe.parallelism, target.ranks)
        ranks = dims.dp_shard * dims.cp
        degree, rows = self.config.degree or ranks, self.config.strip_rows
        if ranks % degree:
            yield Problem(
                f"{self.path}.degree",
                f"{degree} does not divide the number of ranks that share the model, {ranks} "
                "(data_parallel_shard_degree x context_parallel_degree)",
                f"legal: {listed_divisors(ranks)}, or null for all",
            )
        elif rows % degree:
            yield Problem(
                f"{self.path}.strip_rows",
                f"{rows} is not a multiple of the {degree} ranks of a ring",
                f"nearest legal: {nearest_multiples(rows, degree)}",
            )

    def apply(self, plan: RunPlan) -> None:
        loss = RingLoss.Config(
            degree=self.config.degree,
            schedule=self.config.schedule,
            strip_rows=self.config.strip_rows,
            timeout_seconds=plan.recipe.comm.init_timeout_seconds,
        )
        plan.set_loss(self.name, loss)
        plan.wrap_parallelize(keep_head_sharded)

    def on_built(self, trainer: "RecipeTrainer") -> None:
        loss = trainer.loss_fn
        assert isinstance(loss, RingLoss)
        layout = loss.rings.layout
        tokens = trainer.config.training.local_batch_size * trainer.config.training.seq_len
        schedule = loss.schedule(tokens // trainer.parallel_dims.cp, summed=True)
        narrate(
            f"vocabulary: {layout.vocabulary:,} entries on rings of {layout.ring} "
            f"rank{'s' * (layout.ring > 1)}, schedule {schedule}, "
            f"strips of {self.config.strip_rows:,} x {layout.widest:,} logits"
        )

    def loss_term(self, recipe: "Recipe", target: Target) -> MemoryTerm:
        """What the schedule holds, and the part of the head and its gradient, where these are not
        the parameter and its gradient themselves, which are FSDP's shards and counted there."""
        layout, tokens = self._layout(recipe, target), local_tokens(recipe)
        dtype = TORCH_DTYPE_MAP[recipe.training.mixed_precision_param]
        schedule = self.config.schedule
        chosen = choose(tokens, layout, summed=True) if schedule == "auto" else schedule
        sizes = Sizes(tokens, layout, self.config.strip_rows, recipe.model.hidden_width, dtype)
        kept = gradient = TORCH_DTYPE_MAP[recipe.training.dtype]
        if recipe.components.offload_stream_adamw.enabled:
            kept, gradient = dtype, torch.float32
        replicas = ParallelDims.from_config(recipe.parallelism, target.ranks).dp_replicate
        return MemoryTerm(
            "strips of logits and what they are made of, while the loss is computed",
            sizes.schedule(chosen) + sizes.head(kept, gradient, replicas),
        )

    def _layout(self, recipe: "Recipe", target: Target) -> VocabularyLayout:
        dims = ParallelDims.from_config(recipe.parallelism, target.ranks)
        ranks = dims.dp_shard * dims.cp
        return VocabularyLayout(recipe.model.vocab_size, ranks, self.config.degree or ranks)


@dataclass(frozen=True)
class Sizes:
    """Bytes that one rank holds besides hidden states, parameters and gradients of parameters.

    Attributes:
        tokens: of one rank, as if none were ignored.
        layout: of the vocabulary.
        strip_rows: tokens of one strip.
        width: numbers in a hidden state.
        dtype: of hidden states and logits.
    """

    tokens: int
    layout: VocabularyLayout
    strip_rows: int
    width: int
    dtype: torch.dtype

    @property
    def _row(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def _wide_row(self) -> int:
        return self.width * FLOAT32

    def schedule(self, schedule: Schedule) -> int:
        """A strip, what is on its way between ranks, and the gradient of the hidden states."""
        alone, together = self.layout.ring == 1, self.layout.ring if schedule == "fused" else 1
        rows = min(self.strip_rows, together * self.tokens)
        strip = strip_bytes(rows, self.layout.widest, self.dtype)
        moving = self._alone(schedule, rows) if alone else self._moving(schedule, rows)
        return strip + moving + self.tokens * self._row

    def _alone(self, schedule: Schedule, rows: int) -> int:
        """Hidden states of tokens that are not ignored, and their gradient: of a strip, or all."""
        return 2 * (rows if schedule == "fused" else self.tokens) * self._row

    def _moving(self, schedule: Schedule, rows: int) -> int:
        ring, widest = self.layout.ring, self.layout.widest
        if schedule == "fused":
            return 2 * rows * self._row + rows * (ring + 2) * self._wide_row // ring
        kept = self.tokens * self._row
        if schedule == "move_weights":
            wide = self.tokens + 3 * widest
            return kept + 2 * widest * self._row + wide * self._wide_row
        # Four float32, again as they come home, two to merge them, and an int64 target.
        statistics = 48 * ring * self.tokens
        return kept + 2 * self.tokens * self._row + 3 * self.tokens * self._wide_row + statistics

    def head(self, kept: torch.dtype, gradient: torch.dtype, replicas: int) -> int:
        """The compute shard, where the parameter is ``kept`` otherwise, and its gradient in float32
        before it is summed over ranks, or rounded to the parameter's."""
        layout = self.layout
        if layout.ring < layout.ranks:
            sums = (layout.padded_rows + layout.chunk) * self._wide_row
            return layout.padded_rows * self._row + sums
        copied = layout.chunk * self._row if kept != self.dtype else 0
        summed = replicas > 1 or gradient != torch.float32
        return copied + (layout.chunk * self._wide_row if summed else 0)
