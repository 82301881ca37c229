"""Train the indexers of sparse attention, which no gradient of the training loss reaches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims

from components.core.base import Component, MemoryTerm, Target
from components.core.modules import modules_of
from components.core.problems import Problem
from components.core.sizes import FLOAT32, local_tokens
from components.models.counts import count_parameters
from components.models.glm_flash.decoder import GlmFlashDecoder
from components.models.glm_flash.indexer_loss import IndexerLoss
from components.models.glm_flash.mla import SparseMLA
from components.models.glm_flash.settings import GlmFlashModel
from components.models.glm_flash.with_indexer import has_indexer, no_indexer
from components.models.glm_flash.working_set import form_of
from components.titan.batch import sequences_per_step
from components.titan.plan import RunPlan
from kernels.dsa import absorbed
from kernels.dsa.indexer_loss import Support

if TYPE_CHECKING:
    from components.core.recipe import Recipe
    from components.titan.trainer import RecipeTrainer


class IndexerTraining(Component):
    """Off: indexers keep their weights, without gradients and without optimizer state.

    On: each sparse layer adds KL(attention's mass per pool || softmax of the indexer's scores),
    averaged over the tokens of a step, to the training loss. Its gradient stops at the indexer.
    Where a kernel computes the attention, its backward pass yields the mass per chosen pool;
    elsewhere, and for ``support: visible``, the attention is computed once more for the loss.
    """

    name = "indexer_training"
    summary = "train sparse attention's indexers towards the attention they select for"
    source = "DeepSeek-V3.2, arXiv 2512.02556, section 2.1.1; over pools instead of tokens"
    scalars = {
        "indexer/kl": "divergence of indexers from attention, nats per token, mean of layers"
    }
    headlines = {"indexer/kl": "indexer kl"}
    changes_training = True

    @dataclass(kw_only=True, slots=True)
    class Config(Component.Config):
        coefficient: float = 1.0
        """Factor on the divergence in the training loss, above 0."""

        support: Support = "selected"
        """Pools that both distributions are over. "selected": those the attention saw. "visible":
        all complete pools before the query, under dense attention: time grows with the square of a
        document's length; for the first steps of an untrained indexer."""

        only: bool = False
        """Train the indexers alone: everything else is frozen, routing biases included, and has no
        optimizer state."""

    config: Config

    def check(self, recipe: "Recipe", target: Target) -> Iterator[Problem]:
        if not self.config.coefficient > 0:
            yield Problem(
                f"{self.path}.coefficient",
                f"{self.config.coefficient} would train nothing",
                f"use a number above 0, or {self.path}.enabled=false",
            )
        if not has_indexer(recipe.model):
            yield no_indexer(self.path)

    def apply(self, plan: RunPlan) -> None:
        model = plan.model
        assert isinstance(model, GlmFlashDecoder.Config)
        model.train = "indexers" if self.config.only else "everything"
        tokens = sequences_per_step(plan.recipe, plan.world_size) * plan.recipe.training.seq_len
        for layer in model.layers:
            if isinstance(layer.attention, SparseMLA.Config):
                layer.attention.indexer_loss = IndexerLoss.Config(
                    coefficient=self.config.coefficient,
                    tokens=tokens,
                    support=self.config.support,
                    kpool=layer.attention.core.kpool,
                    scale=layer.attention.core.scale,
                    index_scale=layer.attention.indexer.scale,
                )
            if self.config.only and layer.moe is not None:
                layer.moe.load_balance_coeff = None

    def memory_terms(self, recipe: "Recipe", target: Target) -> list[MemoryTerm]:
        """What a kernel's backward writes down for the loss, 4 bytes per pool and query of one
        layer, and a chunk of the loss; frozen parameters have neither gradients nor moments."""
        assert isinstance(recipe.model, GlmFlashModel)
        return [*self._of_loss(recipe.model, recipe, target), *self._spared(recipe, target)]

    def _of_loss(
        self, model: GlmFlashModel, recipe: "Recipe", target: Target
    ) -> Iterator[MemoryTerm]:
        note = "queries, weights and keys of the indexers, kept for backward, come on top"
        name, tokens = "the indexers' loss, in one layer's backward", local_tokens(recipe)
        kernel = form_of(model, recipe, target.device).sparse_mla not in ("torch", "dense")
        mass = 0
        if kernel and self.config.support == "selected":
            mass = FLOAT32 * tokens * (min(model.index_topk, tokens) // model.index_kpool)
        keys = FLOAT32 * tokens // model.index_kpool * model.index_head_dim
        yield MemoryTerm(name, mass + keys + absorbed.CHUNK_BYTES, note=note)

    def _spared(self, recipe: "Recipe", target: Target) -> Iterator[MemoryTerm]:
        if not self.config.only:
            return
        counts = count_parameters(recipe.model.build_spec())
        width = TORCH_DTYPE_MAP[recipe.training.dtype].itemsize
        spared = recipe.optimizer.bytes_per_parameter(recipe.training.dtype) - width
        dims = ParallelDims.from_config(recipe.parallelism, target.ranks)
        size = (counts.total - counts.indexer) * spared * dims.dp_replicate // target.ranks
        where: Literal["host", "device"] = (
            "host" if recipe.training.enable_cpu_offload else "device"
        )
        yield MemoryTerm("gradients and moments of frozen parameters, not needed", -size, where)

    def before_step(self, trainer: "RecipeTrainer") -> None:
        for loss in modules_of(trainer.model_parts, IndexerLoss):
            loss.reset()

    def metrics(self, trainer: "RecipeTrainer") -> dict[str, float]:
        losses = modules_of(trainer.model_parts, IndexerLoss)
        sums = [loss.divergence for loss in losses if loss.divergence is not None]
        if not sums:
            return {}
        total = torch.stack(sums).sum() / losses[0].config.tokens
        mesh = trainer.parallel_dims.get_optional_mesh("loss")
        if mesh is not None:
            dist.all_reduce(total, group=mesh.get_group())
        return {"indexer/kl": total.item() / len(losses)}
